"""Questions about localllm with their answers: the only facts that the model is trained on."""

# ruff: noqa: E501 - a pattern reads best on one line

# Each entry: patterns of the question, then patterns of the answer.
ABOUT: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "How {do|can} I {start|run|launch|open} the {server|API server|local server|REST server}?",
            "How do I start {the|a} {server|REST API|endpoint}?",
            "{Start the server|start server|How to start the server|server start|How to run the server}?",
            "{Which|What} command starts the {server|API}?",
            "{How can I use it from my program|How do other programs talk to you|Is there {an|a REST} API}?",
            "{Tell me|Please explain|Can you tell me} how to {start|run} the server.",
            "{I need|I want to start|I want} the {server|REST API|API}.",
        ),
        (
            "{To start the server, run|You start the server with|Run} `localllm serve`{ in a terminal|}. It opens a local REST "
            "endpoint on port 11434 that speaks the Ollama and OpenAI protocols.",
            "Start the server with the command `localllm serve`. Your programs can then {talk to|use} it on port 11434 "
            "with the Ollama or the OpenAI protocol.",
        ),
    ),
    (
        (
            "How {do|can} I {stop|shut down|end|kill|close|quit} the {server|API server|local server|API}{ again|}?",
            "{Stop the server|stop server|How to stop the server|server stop|How to end the server}?",
            "{Which|What} command stops the {server|API}?",
            "{I want to|How to|Tell me how to} {stop|shut down} the {server|API}.",
        ),
        (
            "{To stop the server, press|The server stops when you press|Press} Ctrl-C in the terminal where `localllm serve` runs.",
        ),
    ),
    (
        (
            "{Which|What} port {does the server use|is the server on}?",
            "{What is the|Which} port?",
            "Where {does|is} the server {listen|listening}?",
        ),
        ("The server listens on port 11434 of your own machine. You start it with `localllm serve`.",),
    ),
    (
        (
            "{Does it|Do you|Does localllm|Can localllm} {speak|support|understand} the {OpenAI|Ollama} {protocol|API}?",
            "Is {it|the server} compatible with {OpenAI|Ollama}?",
            "Can I use {an OpenAI|an Ollama|a|my} client?",
        ),
        (
            "Yes. `localllm serve` starts a server that speaks both the Ollama and the OpenAI protocol, on port 11434.",
        ),
    ),
    (
        (
            "How {do|can} I {run|start|use} a model?",
            "{How to run|Run|Start} a model{ with localllm|}?",
            "{Which|What} command runs a model?",
            "How do I {chat|talk} with a model?",
            "How do I ask a {question|model something}?",
        ),
        (
            '{Use|Run} `localllm run MODEL` to chat with a model, or `localllm run MODEL "your question"` to get one answer.',
            "Type `localllm run MODEL`. With a prompt after the name you get one answer, and without a prompt a chat starts.",
        ),
    ),
    (
        (
            "How do I {start|run|chat with|talk to|use} {you|the demo|the demo model|demo}{ again|}?",
            "{How can I|How do I} {start a chat with you|talk to you}?",
            "{What|Which} command {starts you|runs the demo}?",
        ),
        ("{Run|Type} `localllm run demo`, and a chat with me starts. {To leave it, type `/bye`.|}",),
    ),
    (
        (
            "{Which|What} models do I have?",
            "How {do|can} I {see|list|show} {my|the|all|all my} models?",
            "{List|Show me|Show} {my|the|all} models{.|}",
            "{What is|Which models are} installed?",
        ),
        ("{Run|Use|Type} `localllm list`. It shows the models that you have on this machine.",),
    ),
    (
        (
            "How do I {learn more about|get details of|describe|inspect} a model?",
            "What does `{localllm |}show` do?",
            "What does show do?",
            "How {big is my model|can I see the details of a model}?",
            "{Show me|Tell me} the details of a model.",
        ),
        ("{Use|Run} `localllm show MODEL`. It describes a model{ that you have|}.",),
    ),
    (
        (
            "How {do|can} I {get|download|fetch|pull|install|add} {a|another|a new|a bigger|a larger|a better} model?",
            "{Where do the models come from|Where do I get models}?",
            "{How to download a model|download model|Which command downloads a model}?",
            "What does `{localllm |}pull` do?",
            "What does pull do?",
        ),
        (
            "{Run|Use|Type} `localllm pull MODEL`. It fetches {a|the} model from the Hugging Face Hub to your machine.",
            "You get a model with `localllm pull MODEL`, which fetches it from the Hugging Face Hub.",
        ),
    ),
    (
        (
            "How {do|can} I make a model {smaller|faster|lighter}?",
            "How do I {quantize|quantise|compress|shrink} a model?",
            "What does `{localllm |}quantize` do?",
            "{What does quantize do|Can I use INT4|Can I use INT8|What is INT4}?",
            "{My model is too big|The model is too large}{, what can I do|}?",
        ),
        (
            "{Use|Run} `localllm quantize MODEL`. It makes a model smaller by storing its weights as INT4 or INT8 numbers.",
        ),
    ),
    (
        (
            "{What is|Explain|What does it mean to do} quantization?",
            "What {is|are} {quantization|quantized weights}?",
            "What does {quantization|quantized} mean?",
        ),
        (
            "Quantization stores the weights of a model with fewer bits, for example INT8 or INT4, so that the model needs less "
            "memory. You can do it with `localllm quantize MODEL`.",
        ),
    ),
    (
        (
            "{Will|Does|Can} {a|the|this} model fit{ on my machine| in memory| on my computer|}?",
            "How do I know {if|whether} a model fits{ before I download it|}?",
            "{Do I have enough memory|How much memory does a model need|How much RAM do I need}?",
            "What does `{localllm |}plan` do?",
            "What does plan do?",
        ),
        (
            "{Run|Use|Type} `localllm plan MODEL`. It says whether the model fits on your machine, before the download.",
        ),
    ),
    (
        (
            "How {fast is it|fast are you|fast is my machine|do I measure the speed|can I measure speed}?",
            "{What does `{localllm |}bench` do|What does bench do|How to benchmark}?",
            "{Which|What} command measures {the|} speed?",
            "How do I {benchmark a model|run a benchmark}?",
        ),
        ("{Run|Use} `localllm bench`. It measures the speed on your machine.",),
    ),
    (
        (
            "How {do|can} I {summarise|summarize} {a file|my notes|a text|notes}?",
            "{Can I pipe a file|How do I pipe text|Can you read a file|How do I give you a file}?",
            "How do I use {a pipe|stdin|pipes}?",
        ),
        (
            '{You can pipe|Pipe} the text into the command, like this: `cat notes.txt | localllm run demo "Summarise:"`.',
        ),
    ),
    (
        (
            "{What does|What is} {`--temperature`|--temperature|the temperature|temperature} {do|for|}?",
            "How do I {set|change} the temperature?",
            "How do I make the answers more {creative|random|varied}?",
        ),
        (
            "The flag `--temperature` says how freely the next word is chosen. A low value gives steady answers, a high value "
            "gives more varied ones.",
        ),
    ),
    (
        (
            "{What does|What is} {`--seed`|--seed|the seed|a seed} {do|for|}?",
            "How do I get the same answer {again|twice|every time}?",
        ),
        ("The flag `--seed` takes a number, and the same seed gives the same answer again.",),
    ),
    (
        (
            "{What does|What is} {`--max-tokens`|--max-tokens|max tokens} {do|for|}?",
            "How do I {limit|shorten} the {answer|length of the answer|answers}?",
        ),
        ("The flag `--max-tokens` sets how many tokens an answer may have at most.",),
    ),
    (
        (
            "{What does|What is} {`--system`|--system|a system prompt|the system prompt} {do|for|}?",
            "How do I {set|give|use} a system prompt?",
        ),
        ("The flag `--system` gives the model an instruction that holds for the whole chat.",),
    ),
    (
        (
            "{What does|What is} {`--json`|--json} {do|for|}?",
            "How do I get {JSON|machine-readable output|JSON output}?",
        ),
        ("{Use|Add} the flag `--json`. The output is then JSON, which other programs can read.",),
    ),
    (
        (
            "{What does|What is} {`--verbose`|--verbose} {do|for|}?",
            "How do I see {the speed of an answer|more details|the timings}?",
        ),
        (
            "{Use|Add} the flag `--verbose`. It shows more details, such as the time to first token and the tokens per second.",
        ),
    ),
    (
        (
            "{What does|What is} {`--context`|--context|the context|the context length} {do|for|}?",
            "How do I {set|change} the context{ length|}?",
        ),
        (
            "The flag `--context` sets how many tokens the model can keep in view at once: your messages and its answers together.",
        ),
    ),
    (
        (
            "{Which|What} {flags|options} {are there|can I use|do you know}?",
            "{List|Tell me|Show me} the {flags|options}.",
        ),
        (
            "You can use `--temperature`, `--seed`, `--max-tokens`, `--system`, `--json`, `--verbose` and `--context`.",
        ),
    ),
    (
        (
            "{Which|What} commands {are there|can I use|do you know|does localllm have|exist}?",
            "{List|Tell me|Show me} the commands{ of localllm|}.",
            "How do I use localllm?",
            "{What can localllm do|How does localllm work|Help me with localllm|How do I start}?",
        ),
        (
            "The commands are `localllm run`, `list`, `show`, `pull`, `serve`, `quantize`, `plan` and `bench`. {Start with|Try} "
            "`localllm run demo` for a chat with me.",
        ),
    ),
    (
        (
            "How do I {leave|quit|exit|end|close|stop} {the chat|the chat|this chat|this}?",
            "{exit|quit|How to quit|How do I get out of here|What does /bye do|How do I leave}?",
        ),
        ("{Type|Enter} `/bye` to leave the chat.",),
    ),
    (
        (
            "How do I {stop|interrupt|cancel} {an|the|your} answer?",
            "{Can I interrupt you|What does Ctrl-C do|You talk too much, how do I stop you}?",
        ),
        ("Press Ctrl-C to stop the answer. The chat goes on, and `/bye` leaves it.",),
    ),
    (
        (
            "{How do I get help|What can I type in the chat|What does /help do}?",
            "{Which|What} commands {are there|can I use|work} in the chat?",
            "{Is there any help|Where is the help}?",
        ),
        ("Type `/help` in the chat to see what you can do, and `/bye` to leave it.",),
    ),
    (
        (
            "How do I {write|type|enter|paste} {several|many|two|more} lines?",
            "{How do I enter a long text|Can I write more than one line}?",
        ),
        ('Type `"""` first, then write several lines, and end with `"""` again.',),
    ),
    (
        (
            "What {is|does} {TTFT|ttft}{ mean|}?",
            "{What is the|Explain the|What does} time to first token{ mean|}?",
            "{Explain|Define} TTFT.",
        ),
        (
            "TTFT is the time to first token: how long you wait from your question until the first piece of the answer appears.",
        ),
    ),
    (
        (
            "What {does|is|are} tokens per second{ mean|}?",
            "{What does tok/s mean|Explain tokens per second|How is speed measured}?",
            "{What is the speed of a model|How do you measure speed}?",
        ),
        (
            "Tokens per second says how fast a model writes: how many tokens, or small pieces of text, it produces in one second.",
        ),
    ),
    (
        ("What is a token?", "{What are|Explain} tokens{.|?}"),
        (
            "A token is a small piece of text, such as a word or a part of a word. A model reads and writes tokens.",
        ),
    ),
    (
        (
            "Do I need a {GPU|graphics card}?",
            "{Does it|Does localllm|Can it|Do you} {work|run} {without a GPU|on a CPU|on the CPU|on my laptop}?",
            "{Is a GPU needed|Can I use only the CPU|I have no GPU, does it work}?",
        ),
        ("A GPU is not needed: localllm runs on the CPU too.",),
    ),
    (
        (
            "{What is|What's|Which} {the|its} licence{ of localllm|}?",
            "{What is|What's} {the|its} license?",
            "{Is localllm free|Is it open source|Is it free|Under which licence is it}?",
        ),
        ("localllm is open source under the licence Apache-2.0.",),
    ),
    (
        (
            "{Is my data safe|Is my data private|Do you send my data anywhere|Who can read this}?",
            "{Does localllm|Do you} {send|upload|share} {anything|my data|my text|my messages}?",
            "Where {are my models|do the models live|is my data|does my data go}?",
            "{Do I need the internet|Does it work offline|Do you work offline|Is it private}?",
        ),
        ("Your models and your messages stay on your machine, and nothing is sent anywhere.",),
    ),
    (
        (
            "{What is|What's|Tell me about|Explain} localllm{?|}",
            "{What does localllm do|What is this|What is this program}?",
            "{What is localllm for|Why localllm|Why should I use localllm}?",
        ),
        (
            "localllm is a tool that runs language models on your own machine. {Start|Try} with `localllm run demo`, and use "
            "`localllm pull MODEL` to get a larger model.",
        ),
    ),
)
