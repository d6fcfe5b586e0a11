"""What each field of SamplingParams does, in one line, for `--help` and for the settings of the app."""

PARAMETER_HELP = {
    "temperature": "0 takes the likeliest token; more varies more.",
    "top_k": "Keep the K likeliest tokens; 0 keeps all.",
    "top_p": "Keep the likeliest tokens that add up to P.",
    "min_p": "Keep tokens at least P times as likely as the likeliest.",
    "repetition_penalty": "Make tokens seen before X times less likely; 1 is off.",
    "repeat_last_n": "How many last tokens that looks at; -1 is all.",
    "presence_penalty": "Subtract X from tokens already in the answer.",
    "frequency_penalty": "Subtract X for each time a token is in the answer.",
    "logit_bias": "Add BIAS to the logit of token ID; -inf forbids it. Repeatable.",
    "seed": "Same seed, same text.",
    "max_tokens": "Most tokens of the answer; else until the context is full.",
    "stop": "End before this text. Repeatable.",
    "stop_ids": "End at this token. Repeatable.",
    "ignore_eos": "Go on past the model's end tokens.",
}
THINK_HELP = "Let the model think first, or not, if its template has a switch."
