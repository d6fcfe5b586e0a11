"""Prompt lookup for speculative decoding: copies draft tokens from where the newest tokens occurred before, in the
prompt or in the answer.

Each run of three tokens points to the previous equal run, so that indexing a token costs one entry (0.3 us), and a
search compares only the newest few occurrences. A match that keeps being right is followed without a search. The
index contains accepted tokens only.
"""

MIN_MATCH_LEN = 3  # tokens
MAX_MATCH_LEN = 32  # tokens that a search compares: longer matches are not better
MAX_CANDIDATES = 32  # occurrences that a search compares, newest first
INDEX_CHUNK_TOKENS = 2048  # tokens indexed at a time, in half a millisecond, while a prompt is being computed


class PromptLookup:
    """An index of a token list that only grows at its end."""

    def __init__(self, token_ids: list[int]):
        self.token_ids = token_ids
        self.last_end: dict[tuple[int, int, int], int] = {}  # the end of the newest occurrence of a run of three
        self.previous_end = [0] * MIN_MATCH_LEN  # [end of a run]: end of the previous equal run; 0: there is none
        self.matched_count = 0  # tokens that the match covers
        self.continuation_start = 0  # index behind the match
        self.match_len = 0  # tokens of the match; 0: there is none

    def index_tokens(self, max_tokens: int = INDEX_CHUNK_TOKENS) -> bool:
        """Index up to `max_tokens` more tokens. Returns whether all tokens are indexed."""
        begin, last_end, previous_end = len(self.previous_end) - MIN_MATCH_LEN, self.last_end, self.previous_end
        tokens = self.token_ids[begin : begin + max_tokens + MIN_MATCH_LEN - 1]
        for run in zip(tokens, tokens[1:], tokens[2:], strict=False):
            end = len(previous_end)
            previous_end.append(last_end.get(run, 0))
            last_end[run] = end
        return len(previous_end) > len(self.token_ids)

    def match(self) -> int:
        """Return the length of the longest run that ends the tokens and occurred before, preferring the newest.

        Returns 0 if it is shorter than MIN_MATCH_LEN, or if not all tokens are indexed yet.
        """
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
        end_index = self.previous_end[end]
        for _ in range(MAX_CANDIDATES):
            if not end_index or self.match_len >= MAX_MATCH_LEN:
                break
            length, max_len = MIN_MATCH_LEN, min(MAX_MATCH_LEN, end_index)
            while length < max_len and tokens[end_index - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > self.match_len:
                self.continuation_start, self.match_len = end_index, length
            end_index = self.previous_end[end_index]

    def continuation(self, max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens behind the match; a repeating text is assumed to continue repeating."""
        tokens = (
            self.token_ids[self.continuation_start : self.continuation_start + max_tokens]
            if self.match_len
            else []
        )
        period = len(self.token_ids) - self.continuation_start
        while tokens and len(tokens) < max_tokens:
            tokens.append(tokens[len(tokens) - period])
        return tokens
