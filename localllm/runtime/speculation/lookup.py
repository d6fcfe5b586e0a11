"""Where the last tokens of a sequence stood before, in its prompt or its answer, and what came next there.

Every run of three tokens leads to the run like it before, so a token more costs one entry (0.3 us), and a search
compares what stands before the newest few of them. A match that goes on is followed without a search. Knows no
engine: it is told tokens that stay.
"""

LEAST = 3  # tokens of a match
LONGEST = 32  # tokens that a search compares: a longer match is no better
CANDIDATES = 32  # places that a search looks at, the newest first
PIECE = 2048  # tokens that are taken up at a time, in half a millisecond: a prompt is, while it is computed


class Lookup:
    """Follows a list of tokens that grows at its end and is changed nowhere else."""

    def __init__(self, token_ids: list[int]):
        self.token_ids = token_ids
        self.newest: dict[tuple[int, int, int], int] = {}  # where a run of three ended last
        self.before = [0] * LEAST  # [end of a run]: where the run like it before ended; 0: nowhere
        self.known = 0  # tokens that the match is of
        self.source = 0  # what came behind the match begins here
        self.length = 0  # tokens of the match; 0: there is none

    def take_up(self, most: int = PIECE) -> bool:
        """Take up so many tokens. Are all known then?"""
        begin, newest, before = len(self.before) - LEAST, self.newest, self.before
        tokens = self.token_ids[begin : begin + most + LEAST - 1]
        for run in zip(tokens, tokens[1:], tokens[2:], strict=False):
            end = len(before)
            before.append(newest.get(run, 0))
            newest[run] = end
        return len(before) > len(self.token_ids)

    def match(self) -> int:
        """How many of the last tokens stood together before: the longest such run, and of two the later; 0 where
        fewer than LEAST did, or where not all are taken up."""
        if not self.take_up():
            return 0
        for token in self.token_ids[self.known :]:
            if self.length and self.token_ids[self.source] == token:
                self.source, self.length = self.source + 1, self.length + 1
            else:
                self.length = 0
            self.known += 1
        if not self.length:
            self.search()
        return self.length

    def search(self) -> None:
        tokens, end = self.token_ids, len(self.token_ids)
        place = self.before[end]
        for _ in range(CANDIDATES):
            if not place or self.length >= LONGEST:
                break
            length, most = LEAST, min(LONGEST, place)
            while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > self.length:
                self.source, self.length = place, length
            place = self.before[place]

    def continuation(self, most: int) -> list[int]:
        """What came behind the match. A text that repeats itself is thought to go on so."""
        found = self.token_ids[self.source : self.source + most] if self.length else []
        period = len(self.token_ids) - self.source
        while found and len(found) < most:
            found.append(found[len(found) - period])
        return found
