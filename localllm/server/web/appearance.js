// Light or dark, before the first paint: what the visitor chose here, else what the system says (theme.css).
// A plain script, as modules run only after the document was painted.
document.documentElement.dataset.theme = localStorage.getItem("localllm.theme") ?? "system";
