"""Story plots: the hero's wish, a problem, a helper, an ending and a moral."""

# ruff: noqa: E501 - a pattern reads best on one line

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OPENING = (
    "{Once upon a time, <a_trait> <hero> called <name> lived <in_place>."
    "|Once upon a time there was <a_trait> <hero> called <name>, who lived <in_place>."
    "|<In_place> lived <a_trait> <hero> called <name>.}"
)


@dataclass(frozen=True)
class Plot:
    """Sentence patterns of one plot. A sentence that starts with "?" is optional."""

    theme: str
    helpers: tuple[str, str]  # only two, so that the model does not confuse them
    sentences: Sequence[str]
    moral: str
    summary: str
    slots: Mapping[str, Sequence[str]] = field(default_factory=dict)
    uses_thing: bool = False
    opening: str = OPENING


PLOTS = (
    Plot(
        theme="something that was lost",
        helpers=("squirrel", "mouse"),
        uses_thing=True,
        sentences=(
            "{<name> loved nothing more than <his> <thing>.|The best thing <he> had was <a_thing>.}",
            "?{<He> took it everywhere <he> went.|Every night <he> put it beside <his> bed.}",
            "{But one <day> morning|One <day> morning, however,|But on a <day> morning} the <thing> was gone.",
            "<He> looked {under the bed|behind the door|under the table} and {in the kitchen|in every cupboard}, "
            "but {it was not there|there was no <thing>}.",
            "?<name> sat down {and cried a little|and was very sad}.",
            'Then <a_helper> came by and asked, "{Why are you so sad|What is the matter}, <name>?"',
            '"{I have lost my <thing>|My <thing> is gone}," said <name>.',
            '"{I saw it|I think I saw it} <spot>," said the <helper>. "{Come with me|Let us look together}!"',
            "They {went there together|ran there as fast as they could}, and {there it was|there lay the <thing>}.",
            "<name> {hugged|thanked} the <helper>, and {they played together until it was dark|they had tea together}.",
        ),
        moral="{A friend who helps you to look is worth more than the thing you lost.|Two friends find more than one.}",
        summary="<name> the <hero> lost <his> <thing>, and <a_helper> helped <him> to find it <spot>.",
        slots={
            "day": ("rainy", "windy", "cold", "bright"),
            "spot": (
                "under the old oak tree",
                "near the well",
                "behind the big rock",
                "on the little bridge",
            ),
        },
    ),
    Plot(
        theme="being brave",
        helpers=("rabbit", "hedgehog"),
        sentences=(
            "<name> was afraid of {only one thing: <fear>|<fear>}.",
            "?{<He> told nobody about it.|When <his> friends laughed, <he> hid behind a tree.}",
            'One evening <he> heard a {small|weak|quiet} voice. "{Help! Help!|Please help me!}"',
            "It was <a_helper>, who {had fallen into a hole|was stuck under a branch|had hurt a leg}.",
            "But to get there, <name> had to face <fear>.",
            "<His> {heart beat fast|legs shook}, but <he> {took a deep breath|closed <his> eyes for a moment} and went on.",
            '?"I am coming!" {called|cried|shouted} <name>.',
            "Step by step <he> {came closer|went on}, and {at last|soon} <he> pulled the <helper> to safety.",
            '"{You are the bravest <hero> I know|Thank you, you are so brave}," said the <helper>.',
            "{From that day on,|After that,} <name> was not so afraid of <fear> any more.",
        ),
        moral="{To be brave is to be afraid and to help all the same.|Being brave does not mean that you are never afraid.}",
        summary="<name> the <hero> was afraid of <fear>, but was brave and saved <a_helper>.",
        slots={"fear": ("the dark", "deep water", "high places", "the old bridge", "the deep wood")},
    ),
    Plot(
        theme="learning something new",
        helpers=("owl", "crow"),
        sentences=(
            "<name> {wanted to learn|dreamed of learning} to <skill>.",
            "<He> tried {on Monday|in the morning}, and <he> tried {on Tuesday|in the evening}, but it {never worked|went wrong every time}.",
            '?"{I will never learn it|I cannot do it}," {sighed|said} <name>.',
            "<A_helper> {heard|saw} this and {smiled|laughed kindly}.",
            '"{I could not <skill> at first either|Nobody can <skill> on the first day}," said the <helper>. "{Let me show you|I will teach you}."',
            "{Every day|Each morning} they practised together, {a little at a time|slowly and with care}.",
            "?Sometimes it went wrong, and then they {laughed|ate an apple} and tried again.",
            "When {spring|summer|winter} came, there was a {big|great} party, and everyone asked <name> to <skill>.",
            "<He> was {nervous|a little nervous}, but <he> did it, and everyone {clapped|cheered}.",
            '"{I knew you could do it|Well done}," said the <helper>, and <name> {was happy|smiled from ear to ear}.',
        ),
        moral="{Practice and a good friend can teach you almost anything.|Do not give up: nobody is good at something on the first day.}",
        summary="<name> the <hero> wanted to learn to <skill>, and with the help of <a_helper> <he> did.",
        slots={
            "skill": (
                "sing",
                "dance",
                "swim",
                "paint",
                "whistle",
                "play the drum",
                "bake bread",
                "read",
                "skate",
                "juggle",
            )
        },
    ),
    Plot(
        theme="sharing",
        helpers=("mouse", "badger"),
        sentences=(
            'One day <name> found {a|a whole} <food>. "{How lucky I am|What a feast}!" said <he>.',
            "<He> {was just about to eat it all|sat down to eat}, when <a_helper> came by.",
            '"I {am so hungry|have not eaten all day}," said the <helper>. "{May I have a little|Can I have a bite}?"',
            "{<name> thought for a moment.|<name> looked at the <food> and thought about it.} {It was not very big.|<He> was hungry too.}",
            '?Then <he> smiled. "{There is enough for two|It tastes better together}."',
            "<He> {cut|broke} the <food> in two and gave {the bigger|the nicer} half to the <helper>.",
            "When {winter|the cold winter} came, <name> had nothing left to eat.",
            "Then there was a knock at the door: it was the <helper>, with a basket full of <gift>.",
            '"You shared with me, {and now|so now} I share with you," said the <helper>.',
            "They {sat by the fire and ate together|ate, sang and laughed} all evening.",
        ),
        moral="{What you share comes back to you.|Food tastes best when you share it.}",
        summary="<name> the <hero> shared a <food> with <a_helper>, who brought <gift> when <name> had nothing.",
        slots={
            "food": ("cake", "loaf of bread", "pumpkin", "pear", "piece of cheese", "honey cake", "melon"),
            "gift": ("apples", "nuts", "berries", "carrots", "warm rolls"),
        },
    ),
    Plot(
        theme="friendship",
        helpers=("hedgehog", "otter"),
        sentences=(
            "<name> {was often alone|had no friends yet} and {wished for|dreamed of} somebody to play with.",
            'So <he> wrote a {letter|short letter}: "{Who wants to be my friend|Who wants to play with me}?"',
            "<He> <sent>, and {waited|began to wait}.",
            "?{One day passed, and another, and nobody came.|<He> waited the whole day and the whole night.}",
            '?"{Perhaps nobody wants to play with me|Maybe nobody read it}," <he> thought.',
            "But on the {third|fourth} day {somebody knocked|there was a knock} at the door.",
            'There stood <a_helper> with the letter. "{I found this|I read your letter}, and I am {lonely|looking for a friend} too!"',
            "<name> {jumped for joy|was so happy that <he> danced}, and they played <game> until the {sun went down|stars came out}.",
            "From then on they {met|played together} every day, and <name> was never lonely again.",
        ),
        moral="{If you want a friend, take the first step.|A friend may be closer than you think.}",
        summary="<name> the <hero> was lonely and wrote a letter, and <a_helper> who found it became a friend.",
        slots={
            "sent": (
                "put it in a bottle",
                "tied it to a balloon",
                "gave it to the wind",
                "pinned it to a tree",
            ),
            "game": ("hide and seek", "ball", "cards", "pirates"),
        },
    ),
    Plot(
        theme="a long journey",
        helpers=("turtle", "otter"),
        sentences=(
            "<name> had {one big wish|only one dream}: <he> wanted to see <goal>.",
            "{One morning|One fine day} <he> packed {some bread|a few apples} and {a warm coat|a blanket} and set off.",
            "{On the first day|After many hours} <he> came to {a wide river|a deep river} and did not know how to cross it.",
            '"{Climb on my back|I know a way across}," said <a_helper>{, who lived there|}. "{But where are you going|Where do you want to go}?"',
            '"I want to see <goal>," said <name>. "{Would you like to come along|Do you want to come with me}?"',
            "?The <helper> {nodded|thought for a moment and nodded}, and so they went on together.",
            "?They {slept under the stars|sang songs} and told each other stories on the way.",
            "After {three|seven|five} days they {climbed the last hill|came over the last hill}, and there they saw <goal>.",
            '"{It is even more beautiful than I thought|It is wonderful}," {whispered|said} <name>, and they looked for a long time.',
            "Then they went home, and <name> told everyone {about it|what they had seen}.",
        ),
        moral="{The best part of a journey is the friend who comes along.|A long way is short with a friend.}",
        summary="<name> the <hero> travelled far to see <goal>, and <a_helper> came along.",
        slots={
            "goal": (
                "the great waterfall",
                "the end of the rainbow",
                "the big ocean",
                "the golden city",
                "the highest mountain",
                "the northern lights",
            )
        },
    ),
    Plot(
        theme="working together",
        helpers=("beaver", "badger"),
        sentences=(
            "{One night|One autumn night} a {great|terrible|wild} storm came and broke <his> <house>.",
            "In the morning <name> stood {in front of it|in the rain} and did not know what to do.",
            '?"{I can never build it again alone|It is too much work for one}," <he> said.',
            '<A_helper> {came by|walked past} and saw it. "{You are not alone|I will help you}," said the <helper>.',
            "{The <helper> called all the neighbours|The <helper> rang a bell}, and {soon everyone came to help|one after another they came}.",
            "{Some carried wood|Some carried stones}, others {cooked soup|held the ladder}, and <name> {hammered|worked} all day.",
            "By the evening the <house> was {ready|finished}, and it was {stronger|nicer} than before.",
            '?"{How can I thank you|What can I give you}?" asked <name>. "{Invite us to supper|Bake us a cake}!" said the <helper>.',
            "So they had a party, and {the lights burned|they danced} until midnight.",
        ),
        moral="{Many hands make light work.|Together you can do what nobody can do alone.}",
        summary="A storm broke the <house> of <name> the <hero>, and with <a_helper> and the neighbours it was built again.",
        slots={"house": ("house", "bridge", "roof", "boat", "fence", "tower")},
    ),
    Plot(
        theme="a strange noise in the night",
        helpers=("owl", "rabbit"),
        sentences=(
            "{One night|One dark night} <name> heard a strange noise: <noise>.",
            '"{What can that be|Who is there}?" <he> thought. "{Is it a monster?|Perhaps it is a monster!}"',
            "?<He> pulled the blanket over <his> head, but the noise {went on|came again}: <noise>.",
            "At last <name> took a {lamp|candle} and {tiptoed|crept} to the door.",
            "{Outside|In front of the door} sat <a_helper> who was {cold and wet|lost and shivering}.",
            '"{I did not want to scare you|I am sorry for the noise}," said the <helper>. "{I cannot find my way home|I am so cold}."',
            '<name> {laughed|smiled}. "{And I thought you were a monster|I am glad you are not a monster}! Come in."',
            "<He> made {hot soup|hot cocoa|warm milk}, and {they told stories until morning|the <helper> soon fell asleep by the fire}.",
            "{The next day|In the morning} <name> brought the <helper> home{, and they became good friends|}.",
        ),
        moral="{Things are often less scary when you look at them with a light.|A strange noise may be someone who needs you.}",
        summary="<name> the <hero> heard a strange noise at night, and it was only <a_helper> who needed help.",
        slots={"noise": ("tap, tap, tap", "scratch, scratch", "whoo, whoo", "bump, bump, bump", "squeak, squeak")},
    ),
    Plot(
        theme="a race",
        helpers=("fox", "rabbit"),
        sentences=(
            "Every {summer|spring} there was a great race, and the prize was <prize>.",
            "{<name> wanted to win, and so did <a_helper>|<name> had practised for weeks, and so had <a_helper>}, {the fastest of all|who had won last year}.",
            '"{Ready, steady, go|One, two, three, go}!" {called the judge|somebody shouted}, and {off they went|they all ran}.',
            "?{Soon|At the first hill} the <helper> was {far ahead|in front}, and <name> came second.",
            "But then the <helper> {tripped over a root|slipped on a stone} and {could not get up|fell into the mud}.",
            '<name> {could have won now|saw the finish line so near}, but <he> stopped. "{Are you hurt|Can you walk}?" <he> asked.',
            '"{My foot hurts|I cannot walk}," said the <helper>. "{Then lean on me|Come, I will hold you}," said <name>.',
            "So they {came in last|crossed the line together, the last of all}, but everybody {cheered|clapped} loudest for them.",
            'The judge gave <prize> to {<name>|both of them}. "{Kindness wins today|The kindest runner wins}," {said the judge|the judge said}.',
        ),
        moral="{To be kind is better than to be first.|Kindness is worth more than any prize.}",
        summary="<name> the <hero> stopped in a race to help <a_helper> and won the prize for kindness.",
        slots={"prize": ("a golden cup", "a silver medal", "a huge cake", "a blue ribbon")},
    ),
    Plot(
        theme="being patient",
        helpers=("turtle", "crow"),
        sentences=(
            "One {spring|sunny} day <name> {found a tiny seed|got a tiny seed from an old traveller} and planted it {by the door|near the house}.",
            "<He> {watered it every day|gave it water every morning} and {looked|waited}, but nothing {happened|grew}.",
            '"{This seed is no good|Nothing will ever grow here}," {said|grumbled} <name> {after a week|at last}.',
            '<A_helper> {sat on the fence|came by} and said, "{Be patient|Wait a little longer}. {Good things take time|Every seed needs its time}."',
            "So <name> {waited|went on}. It rained, and the sun shone, and {it rained again|the days went by}.",
            "?<He> {sang to the seed|told the seed a story} every evening.",
            "And one morning there was a {small green leaf|tiny green leaf}, and {soon|after a few weeks} it was <plant>.",
            '"{You were right|Look, look}," {cried|called} <name>, and the <helper> {smiled|was happy too}.',
            "They {sat beside it|sat in its shade} and {drank lemonade|ate cherries} all summer.",
        ),
        moral="{Good things take time.|Who is patient is rewarded in the end.}",
        summary="<name> the <hero> planted a seed, and after <a_helper> said to be patient, it became <plant>.",
        slots={"plant": ("a tall sunflower", "a beautiful rose", "a young apple tree", "a giant pumpkin plant")},
    ),
    Plot(
        theme="telling the truth",
        helpers=("bear", "badger"),
        uses_thing=True,
        sentences=(
            "One day <name> {borrowed|was allowed to hold} the <thing> of <a_helper>, {a good friend|the neighbour}.",
            '"{Be careful with it|Please take care of it}," said the <helper>. "{It is very dear to me|I had it from my mother}."',
            "But {while <he> played|on the way home} <he> {fell|stumbled}, and the <thing> was {broken|ruined}.",
            '"{I could say that the wind did it|I could hide it and say nothing}," thought <name>, {but it felt wrong|and <his> tummy hurt}.',
            "?{All night <he> could not sleep.|<He> did not even want to eat <his> supper.}",
            '{The next morning|At last} <he> went to the <helper> and said, "{I broke your <thing>|Your <thing> is broken, and it was me}. I am so sorry."',
            'The <helper> was {quiet|sad} for a moment and then said, "{Thank you for telling me the truth|It was brave to tell me}."',
            "Together they {mended|repaired} the <thing> {with glue and string|that afternoon}, and it was {almost like new|as good as new}.",
            "{<name> felt light and happy again.|And <name> slept very well that night.}",
        ),
        moral="{The truth is hard to say, but it makes the heart light.|A friend forgives when you tell the truth.}",
        summary="<name> the <hero> broke the <thing> of <a_helper>, told the truth and was forgiven.",
    ),
    Plot(
        theme="a great invention",
        helpers=("mouse", "beaver"),
        sentences=(
            "<name> liked to build things, and {one day|this time} <he> wanted to build <machine>.",
            "<He> took {old wheels|some wood}, {ropes|nails} and {a lot of glue|a big spring}, and worked {all week|day and night}.",
            "But when <he> tried it, it {went bang|made a funny noise} and {stood still|fell apart}.",
            '?{Everyone laughed.|Smoke came out of it, and <name> coughed.} "{It will never work|That is silly}," {they said|some said}.',
            'Only <a_helper> did not laugh. "{May I have a look?|Let me see!}" said the <helper>.',
            '"{You forgot <part>|I think you need <part>}!" {said|cried} the <helper>{ after a while|}.',
            "{<name> put in <part> and held <his> breath.|They put in <part> together and tried once more.}",
            "{Brrrm|Whirr|Puff, puff}! It worked! {They cheered and hugged each other.|Now everyone wanted to see it.}",
            '"{We did it together|I could not have done it without you}," said <name> to the <helper>.',
        ),
        moral="{A mistake is only one step on the way.|A second pair of eyes often sees what is missing.}",
        summary="<name> the <hero> built <machine>, and it worked when <a_helper> saw that <part> was missing.",
        slots={
            "machine": (
                "a flying machine",
                "a machine that makes pancakes",
                "a boat with wings",
                "a singing clock",
                "a rain machine",
            ),
            "part": ("a small screw", "a second wheel", "a drop of oil", "a feather", "a rubber band"),
        },
    ),
    Plot(
        theme="the fog",
        helpers=("bear", "squirrel"),
        sentences=(
            "Every evening <name> {lit a lamp|hung a lantern} in the window{, because <he> liked the warm light|}.",
            '?"{Why do you do that|What is the light for}?" {the neighbours asked|people asked}. "{You never know|Somebody may need it}," said <name>.',
            "One {night|evening} a thick fog came, and {you could not see your own nose|everything was grey}.",
            "Far away, <a_helper> had lost {the way|the way home} and {called|cried}, but nobody answered.",
            "Then, {very small and far away|through the grey fog}, the <helper> saw a {little|tiny} light.",
            "It was <name>'s lamp! The <helper> {followed it|walked towards it}, step by step, until {the door opened|there was a door}.",
            '"{Come in and get warm|You are safe now}," said <name>, and gave the <helper> {hot tea|some soup}.',
            '"Your light {saved me|showed me the way}," said the <helper>.',
            "{From that night on|After that night} there was a lamp in every window{| around}.",
        ),
        moral="{Even a small light can show someone the way.|A small kindness can be a great help.}",
        summary="<name> the <hero> had a lamp in the window that showed <a_helper> the way through the fog.",
    ),
)
