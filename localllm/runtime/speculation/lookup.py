"""Prompt lookup for speculative decoding: draft tokens copied from where the newest tokens occurred before, in
the prompt or in the answer.

Each run of three tokens points to the previous run like it, so indexing a token costs one entry (0.3 us), and a
search compares only the newest few occurrences. A match that keeps being right is followed without a search. The
index sees accepted tokens only and knows nothing of the engine.
"""

MIN_MATCH_LEN = 3  # tokens of a match
MAX_MATCH_LEN = 32  # tokens that a search compares: a longer match is no better
MAX_CANDIDATES = 32  # places that a search looks at, the newest first
INDEX_CHUNK_TOKENS = (
    2048  # tokens that are taken up at a time, in half a millisecond: a prompt is, while it is computed
)


class PromptLookup:
    """Follows a list of tokens that grows at its end and is changed nowhere else."""

    def __init__(self, token_ids: list[int]):
        self.token_ids = token_ids
        self.last_end: dict[tuple[int, int, int], int] = {}  # where a run of three ended last
        self.previous_end = [0] * MIN_MATCH_LEN  # [end of a run]: where the run like it before ended; 0: nowhere
        self.matched_count = 0  # tokens that the match is of
        self.continuation_start = 0  # what came behind the match begins here
        self.match_len = 0  # tokens of the match; 0: there is none

    def index_tokens(self, max_tokens: int = INDEX_CHUNK_TOKENS) -> bool:
        """Take up so many tokens. Are all known then?"""
        begin, newest, before = len(self.previous_end) - MIN_MATCH_LEN, self.last_end, self.previous_end
        tokens = self.token_ids[begin : begin + max_tokens + MIN_MATCH_LEN - 1]
        for run in zip(tokens, tokens[1:], tokens[2:], strict=False):
            end = len(before)
            before.append(newest.get(run, 0))
            newest[run] = end
        return len(before) > len(self.token_ids)

    def match(self) -> int:
        """How many of the last tokens stood together before: the longest such run, and of two the later; 0 where
        fewer than LEAST did, or where not all are taken up."""
        if not self.index_tokens():
            return 0
        for token in self.token_ids[self.matched_count :]:
            if self.match_len and self.token_ids[self.continuation_start] == token:
                self.continuation_start, self.match_len = self.continuation_start + 1, self.match_len + 1
            else:
                self.match_len = 0
            self.matched_count += 1
        if not self.match_len:
            self.search_match()
        return self.match_len

    def search_match(self) -> None:
        tokens, end = self.token_ids, len(self.token_ids)
        place = self.previous_end[end]
        for _ in range(MAX_CANDIDATES):
            if not place or self.match_len >= MAX_MATCH_LEN:
                break
            length, most = MIN_MATCH_LEN, min(MAX_MATCH_LEN, place)
            while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > self.match_len:
                self.continuation_start, self.match_len = place, length
            place = self.previous_end[place]

    def continuation(self, max_tokens: int) -> list[int]:
        """What came behind the match. A text that repeats itself is thought to go on so."""
        found = (
            self.token_ids[self.continuation_start : self.continuation_start + max_tokens]
            if self.match_len
            else []
        )
        period = len(self.token_ids) - self.continuation_start
        while found and len(found) < max_tokens:
            found.append(found[len(found) - period])
        return found
