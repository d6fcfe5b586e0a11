import json
from itertools import pairwise

import pytest
from markdown_it import MarkdownIt

from localllm.conversation.attach import Attachment
from localllm.conversation.chat import Chat
from localllm.conversation.export import export_text
from localllm.conversation.session_file import SavedSession
from localllm.errors import UsageError
from localllm.request import SamplingParams
from tests.cli.fake_engine import FakeLLM

FRONT_MATTER = (
    '---\ntitle: "a *title*"\nmodel: "demo"\ndate: "2001-09-09T01:46:40Z"\nparameters: {"temperature": 0.5}\n---'
)


@pytest.fixture
def chat():
    chat = Chat(FakeLLM(), SamplingParams(temperature=0.5), system="be brief")
    list(chat.ask("hello"))
    list(chat.ask("thinking", attachments=(Attachment("a_b.py", "```\nprint()\n"),)))
    list(chat.regenerate(chat.current))
    return chat


def text_of(chat, form="md", **more):
    return export_text(SavedSession.from_chat(chat, "a *title*", 1e9, 1e9 + 1), form, **more)


def headings(markdown):
    tokens = MarkdownIt().parse(markdown.split("---\n", 2)[2])
    return [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]


def test_a_branch_becomes_a_readable_page(chat):
    chat.switch_to(chat.turns[1].siblings[0])
    assert text_of(chat) == (
        f"{FRONT_MATTER}\n\n# a \\*title\\*\n\n## System\n\nbe brief\n\n## Question 1\n\nhello\n\n"
        "## Answer 1\n\n2[be brief]:hello\n\n## Question 2\n\nthinking\n\n"
        "a\\_b.py:\n\n````py\n```\nprint()\n````\n\n"
        "## Answer 2\n\n> (thinking)\n>\n> let me see\x07\n\n"
        "4[be brief]:a_b.py:\n````py\n```\nprint()\n````\n\nthinking\n"
    )


def test_the_exported_tree_names_its_branches(chat):
    assert headings(text_of(chat, all_branches=True)) == [
        "a \\*title\\*",
        "System",
        *("Question 1", "Answer 1"),
        *(
            "Question 2, branch 1 of 2",
            "Answer 2, branch 1 of 2",
            "Question 2, branch 2 of 2",
            "Answer 2, branch 2 of 2",
        ),
    ]


@pytest.mark.parametrize(
    "answer",
    ["```py\ncut", "~~~\n```\n", "````\n```\n````\n```", "``` a`b\nx", "    ```\n", "> ```\nx", "```\n``` x"],
)
def test_an_unclosed_code_block_swallows_nothing(chat, answer):
    chat.turns[0].answer = answer
    assert headings(text_of(chat))[-2:] == ["Question 2", "Answer 2"]


def test_a_stopped_answer_is_marked(chat):
    stream = chat.ask("more")
    next(stream)
    stream.close()
    assert text_of(chat).endswith("## Answer 3\n\n6\n\n(stopped)\n")


def test_json_has_the_turns_and_the_messages(chat):
    content = json.loads(text_of(chat, "json"))
    assert (content["title"], content["model"], content["system"]) == ("a *title*", "demo", "be brief")
    assert (content["began"], content["changed"]) == ("2001-09-09T01:46:40Z", "2001-09-09T01:46:41Z")
    assert content["params"]["temperature"] == 0.5
    assert content["messages"] == [{"role": "system", "content": "be brief"}, *chat.messages]
    assert [turn["parent"] for turn in content["turns"]] == [None, 0]
    assert content["turns"][1]["attached"] == [{"name": "a_b.py", "text": "```\nprint()\n"}]
    assert content["turns"][0]["metrics"]["output_tokens"] == len("2[be brief]:hello")
    assert [turn["parent"] for turn in json.loads(text_of(chat, "json", all_branches=True))["turns"]] == [
        None,
        0,
        0,
    ]


def test_another_format_is_refused(chat):
    with pytest.raises(UsageError, match="'pdf' is not a supported format; use md or json"):
        text_of(chat, "pdf")
