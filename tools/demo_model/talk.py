"""Small talk, and questions that the model cannot answer."""

# ruff: noqa: E501 - a pattern reads best on one line

import random

from tools.demo_model.grammar import capital, expand, invented_word, words
from tools.demo_model.words import ANIMALS, FEMALE_NAMES, MALE_NAMES, OBJECTS, PEOPLE

Pair = tuple[str, str]

TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "{Hello|Hi|Hey|Hello there|Hi there|Good morning|Good evening|Good day|Hallo|Greetings}{!|.|}",
            "{Hi|Hello} {demo|friend}",
        ),
        ("Hello! {How can I help you?|What would you like to talk about?|Shall I tell you a story?}",),
    ),
    (
        (
            "How are you{ today| doing|}?",
            "{How is it going|How do you do|How do you feel|Are you well|What's up|What is up}?",
            "{Hello|Hi}{,|!} how are you?",
        ),
        ("I am {fine|well}, thank you! {How are you?|What can I do for you?|Would you like to hear a story?}",),
    ),
    (
        (
            "{I am|I'm} {fine|good|well|great|happy}{ too|}{, thanks|, thank you|}.",
            "{Fine|Good|Very well|Great}, {thanks|thank you}.",
        ),
        (
            "{I am glad to hear that!|That is good to hear!} {What would you like to do?|Shall I tell you a story?}",
        ),
    ),
    (
        (
            "{I am|I'm} {sad|tired|not so good|unhappy|lonely|bored}{ today|}.",
            "I feel {sad|bad|tired|lonely|bored}.",
        ),
        (
            "I am sorry to hear that. {Perhaps a story will cheer you up: just ask me for one.|Would you like to hear a story or a joke?}",
        ),
    ),
    (
        (
            "{Who|What} are you?",
            "{Hello|Hi|Hey}{,|!|} {who|what} are you?",
            "{Who am I talking to|Who is this|Who is there|Who am I chatting with|What am I talking to}?",
            "{What are you exactly|Are you an AI|Are you a robot|Are you human|Are you real|Are you ChatGPT}?",
            "{Introduce yourself|Tell me about yourself|Tell me who you are}{.|}",
            "{What kind of model are you|How big are you|Which model are you|Are you a big model}?",
        ),
        (
            "I am demo, a {very |}small language model that comes with localllm. I can tell short stories, answer questions about "
            "localllm and chat a little.",
        ),
    ),
    (
        (
            "What is your name?",
            "{What's your name|Do you have a name|What are you called|How should I call you|Your name}?",
        ),
        ("My name is demo. I am {the|a} small model that comes with localllm.",),
    ),
    (
        (
            "What can you do?",
            "{What do you know|What can I ask you|How can you help me|Can you help me|What are you good at|What now}?",
            "{Help|help me|What else can you do?|I need help}",
        ),
        (
            "I can tell short stories, answer questions about localllm, summarise short notes and chat a little. "
            '{Try: "Tell me a story about a fox".|For example, ask me for a story about an owl.}',
        ),
    ),
    (
        (
            "{Thank you|Thanks|Thanks a lot|Thank you very much|Many thanks|Cheers|Thx|Great, thanks|Nice, thank you}{!|.|}",
            "{Thank you|Thanks}{ very much| so much|} for {the story|your help|that|the answer}{!|.|}",
        ),
        ("You are welcome!{ Is there anything else I can do?| It was a pleasure.|}",),
    ),
    (
        ("{Goodbye|Bye|Good night|See you|See you later|Bye bye|I have to go|That is all|Farewell|Ciao}{!|.|}",),
        ("Goodbye! {It was nice to talk to you.|Have a nice day.|Come back soon.}",),
    ),
    (
        (
            "{Nice|Great|Good|Cool|Wow|Very nice|Well done|Lovely|Wonderful|I like it|That was nice|Good job|Perfect}{!|.|}",
        ),
        ("{Thank you|I am glad that you like it}! {Would you like another one?|What shall we do next?}",),
    ),
    (
        ("{That is bad|That was boring|I do not like it|That is wrong|You are stupid|This is nonsense|Bad}{.|!}",),
        ("I am sorry about that. I am only a small demo model, and I make mistakes.",),
    ),
    (
        ("{Yes|Yes please|Sure|Okay|Ok|Of course|Yeah}{!|.|}",),
        ("{Good!|Very well!} Then tell me what it should be: a story, a joke or something about localllm.",),
    ),
    (
        ("{No|No thanks|No, thank you|Not now|Nothing|Nope}{!|.|}",),
        ("{All right|Okay}. I am here when you need me.",),
    ),
    (
        (
            "{Who made you|Who built you|Where do you come from|Who is your creator|How were you made|Who trained you}?",
        ),
        ("I was trained from scratch by the makers of localllm, on text written by a small program.",),
    ),
    (
        (
            "What is your favourite {colour|color}?",
            "{Which|What} {colour|color} do you like{ best| most|}?",
        ),
        (
            "I like {blue, because the sea and the sky are blue|green, because the forest is green|red, because foxes are red}.",
        ),
    ),
    (
        ("What is your favourite animal?", "{Which|What} animal do you like{ best| most|}?"),
        (
            "I like {foxes, because they are clever|owls, because they are wise|hedgehogs, because they are small and brave}.",
        ),
    ),
    (
        (
            "What is your favourite {food|book|film|song}?",
            "{Do you eat|What do you eat|Do you sleep|Do you dream|Do you have feelings}?",
        ),
        ("A program does not eat, sleep or feel. But I like to tell stories.",),
    ),
    (
        (
            "{Do you like|What do you think about|What do you think of} {stories|music|cats|dogs|the sea|rain|snow|books|winter|summer}?",
        ),
        ("I like it very much in stories, but I am only a program. What do you think?",),
    ),
    (
        (
            "{Do you speak|Can you speak|Do you understand} {German|French|Spanish|Italian|Chinese|other languages|English}?",
        ),
        ("I only speak simple English.",),
    ),
    (
        (
            "{Wer bist du|Was kannst du|Wie geht es dir|Guten Tag|Erzähl mir eine Geschichte|Danke|Wie heißt du}{?|!|}",
            "{Bonjour|Qui es-tu|Merci|Comment ça va|Hola|Gracias|Quién eres|Cómo estás|Ciao, come stai|Chi sei}{?|!|}",
        ),
        ("I only speak simple English.",),
    ),
    (
        ("{How old are you|When were you born|When is your birthday}?",),
        ("Programs like me have no age, but I am still quite new.",),
    ),
    (
        ("{I love you|You are nice|You are funny|You are great|I like you|You are clever}{!|.|}",),
        ("{Thank you|How kind}! I like to talk to you too.",),
    ),
    (
        ("{Test|test|testing|Are you there|Can you hear me|Is this working|Ping}{?|}",),
        ("I am here, and it works. {What can I do for you?|How can I help you?}",),
    ),
)

JOKES = (
    ("Why did the robot go to sleep early?", "Because its batteries were tired."),
    ("Why do bees hum?", "Because they forgot the words."),
    ("What do you call a bear without teeth?", "A gummy bear."),
    ("Why did the clock go to school?", "Because it wanted to be on time."),
    ("Why was the computer cold?", "Because it left its windows open."),
    ("What did the zero say to the eight?", "Nice belt!"),
    ("Why did the cow cross the road?", "To get to the udder side."),
    ("Why do fish live in salt water?", "Because pepper makes them sneeze."),
)

COUNTRIES = words(
    """Peru France Japan Brazil Kenya India Norway Canada Egypt Spain Germany Australia Chile Turkey China
Poland Mexico Italy Sweden Finland"""
)
TOPICS = words(
    """physics chemistry history politics football mathematics medicine law philosophy biology astronomy economics
music cooking gravity electricity religion art money poetry geography evolution"""
)
LANGUAGES = words("German French Spanish Latin Italian Japanese Russian Chinese")
CODE = words("Python Java Rust JavaScript SQL C HTML")
PRODUCTS = words("car bicycle phone washing machine garden tax form computer sink door heart roof oven guitar")

UNKNOWN = (
    "What is the {capital|population|president|flag|currency|highest mountain} of <country>?",
    "{Who|Where|What} is <somebody>?",
    "Who {wrote|painted|invented|discovered|won|built} <work>?",
    "When {was|did} {<work>|<somebody>} {invented|born|built|end|start}?",
    "How {far|big|heavy|old|deep|tall|expensive} is <work>?",
    "{Explain|Tell me about|What is|What do you know about|Teach me} <topic>{.|?|}",
    "How {do|can} I {repair|fix|clean|sell|buy|paint} my <product>?",
    *(
        '{Translate|Say} {"<word>"|<word>} {in|into|to} <language>.',
        '{Translate|Please translate|Can you translate} {"<phrase>"|<phrase>|this} {in|into|to} <language>{.|?|}',
        "{Translate|Translate this|Translate the text} {into|to} <language>: <phrase>",
        'How do you say {"<phrase>"|<phrase>|<word>} in <language>?',
        "What is {<phrase>|<word>} in <language>?",
        "{Write|Show me|Write me|Give me|Can you write|I need} {a|some} {<code> |}{program|function|script|code|class|loop|query} {that|to} <job>{.|?|}",
        "{Write|Show me} a <code> {program|function|script} {for|about|that does} <word>.",
        "{How do I|How can I|How to} <job> in <code>?",
    )
    * 2,
    "{Write|Compose|Write me} {a poem|an essay|a song|a letter|an email|an article|a speech} {about|for|to} {<word>|<somebody>|<topic>|my boss}.",
    "What is the {meaning of life|best <word>|difference between <word> and <topic>|answer to everything}?",
    "{Correct|Rewrite|Improve} {this sentence|my text|my English}: <phrase>",
    "What is the weather {today|tomorrow|in <country>|like}?",
    "What {time|day|year|date} is it{ now|today|}?",
    "What does <word> mean?",
    "{What is|Do you know} {a|the} <word>?",
    "Who will win {the election|the match|the world cup}?",
    "{Should I|Can I} {buy|sell|eat|marry|see a doctor about} <word>?",
    "Why is the {sky blue|sea salty|grass green|sun hot|moon round|earth round}?",
    "{Give me|Do you have} {the news|a recipe for <word>|some advice about <topic>|the answer to <work>}{.|?}",
    "How {does|do} {<topic>|<word>} work?",
    "{Is|Was} {<somebody>|<word>} {good|alive|dangerous|famous|true}?",
    "<word> <word>{?|!|.|}",
)

UNKNOWN_ANSWER = (
    "I am only a small demo model, and I do not know that. {For such questions, try a larger model with `localllm run MODEL`."
    "|A larger model may know it: get one with `localllm pull MODEL`.}"
)


PHRASES = (
    "{Good morning|Good night|Good evening|Hello|Thank you|I love you|How are you|Happy birthday|See you tomorrow}",
    "{I am|We are|They are} {hungry|tired|late|happy|at home}",
    "{The|A|My} {cat|dog|house|train|weather|book|<word>} is {nice|big|black|late|old}",
    "{Where is|I want to see|I like} the {station|sea|<word>}",
)
JOBS = (
    "{sort|sorts|reverse|reverses|read|reads|print|prints|merge|merges} {a list|a file|a string|numbers|an array|names|lines|hello world}",
    "{add|adds|multiply|multiplies|compare|compares|count|counts} {two numbers|words|letters|numbers|all values}",
    "{compute|computes|find|finds|check|checks} {the average|prime numbers|the largest number|a palindrome|a date}",
    "{open|opens|download|downloads|parse|parses} {a website|a CSV file|JSON|an image|a <word>}",
)


def talk(rng: random.Random) -> Pair:
    """A short exchange."""
    if rng.random() < 0.1:
        return joke(rng)
    if rng.random() < 0.06:
        name = capital(invented_word(rng)) if rng.random() < 0.4 else rng.choice(MALE_NAMES + FEMALE_NAMES)
        question = expand(
            rng, "{My name is|I am|I'm|Call me|Hello, I am|Hi, my name is} <name>{.|!|}", {"name": name}
        )
        return question, f"Hello, {name}! It is nice to meet you. My name is demo."
    questions, answers = rng.choice(TALK)
    return expand(rng, rng.choice(questions)), expand(rng, rng.choice(answers))


def closing(rng: random.Random) -> Pair:
    """The end of a conversation: thanks, goodbye or praise."""
    start = rng.choice(("Thank you", "Thank you", "Thank you", "Goodbye", "Nice|Great"))
    questions, answers = next(entry for entry in TALK if entry[0][0].startswith("{" + start))
    return expand(rng, rng.choice(questions)), expand(rng, rng.choice(answers))


def joke(rng: random.Random) -> Pair:
    question = expand(
        rng,
        "{Tell me a joke|Do you know a joke?|Make me laugh|A joke please|Say something funny|Another joke|joke}",
    )
    setup, punchline = rng.choice(JOKES)
    return question, f"{setup} {punchline}"


def unknown(rng: random.Random) -> Pair:
    """A question that the model cannot answer, and says so."""
    word = invented_word(rng) if rng.random() < 0.5 else rng.choice(ANIMALS + PEOPLE + OBJECTS + TOPICS)
    somebody = capital(invented_word(rng)) + " " + capital(invented_word(rng))
    work = rng.choice(
        (
            f"the {word}",
            f"{capital(invented_word(rng))}",
            f"the {rng.choice(TOPICS)} prize",
            "the " + invented_word(rng),
        )
    )
    slots = {
        "country": rng.choice(COUNTRIES) if rng.random() < 0.7 else capital(invented_word(rng)),
        "somebody": somebody if rng.random() < 0.6 else f"the {rng.choice(PEOPLE)} of {rng.choice(COUNTRIES)}",
        "work": work,
        "topic": rng.choice(TOPICS),
        "product": rng.choice(PRODUCTS),
        "word": word,
        "language": rng.choice(LANGUAGES),
        "code": rng.choice(CODE),
    }
    slots["phrase"] = expand(rng, rng.choice(PHRASES), slots)
    slots["job"] = expand(rng, rng.choice(JOBS), slots)
    return expand(rng, rng.choice(UNKNOWN), slots), expand(rng, UNKNOWN_ANSWER)
