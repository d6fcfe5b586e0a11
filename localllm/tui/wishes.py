"""What a person has chosen in a list or in the palette: messages to the screen of the conversation."""

from textual.message import Message


class ModelChosen(Message):
    """The conversation is to go on with this model."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name


class SessionChosen(Message):
    """This kept conversation is to be gone on with."""

    def __init__(self, id: str):
        super().__init__()
        self.id = id


class CommandChosen(Message):
    """A slash command is to be done; it is to be finished in the prompt first where it is not whole."""

    def __init__(self, line: str, is_whole: bool):
        super().__init__()
        self.line = line
        self.is_complete = is_whole
