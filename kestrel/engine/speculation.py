"""Guessing the next tokens from the session's own text (prompt-lookup decoding, Saxena 2023).

Answers often repeat what is in the prompt: code, names, quotes. Where the last tokens occurred before,
what followed then is a good draft of what follows now. Drafts are rows of the next step beside the
token that is due; they are kept only as far as sampling chooses the very same tokens, so the answer
is bit for bit what it would be without them.
"""

_NGRAMS = (3, 2)  # how many last tokens must have occurred before, tried in this order
_LONGEST_PAUSE = 64  # steps without a draft after many wrong ones


class Drafter:
    """Proposes drafts for one sequence, and pauses the longer the more often it was wrong.

    A wrong draft costs its rows' computation, which a small model feels: after n misses in a row the next
    2^n steps go without, so that text that repeats nothing is hardly slower.
    """

    def __init__(self, most: int):
        """most: longest draft; 0 proposes nothing."""
        self._most = most
        self._length = min(most, 2)  # of the next draft: grows while drafts are right
        self._indexed = 0  # tokens whose n-grams are in the index
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence
        self._misses = 0
        self._pause = 0

    def propose(self, tokens: list[int], room: int) -> list[int]:
        """Up to `room` tokens likely to follow `tokens` (prompt and answer so far); often none."""
        if self._most == 0 or room <= 0:
            return []
        if self._pause:
            self._pause -= 1
            return []
        found = self._lookup(tokens)
        return [] if found is None else tokens[found : found + min(self._length, room)]

    def learn(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of a draft turned out to be right."""
        if not drafted:
            return
        if accepted == 0:
            self._misses += 1
            self._pause = min(2**self._misses, _LONGEST_PAUSE)
            self._length = min(self._most, 2)
        else:
            self._misses = 0
            if accepted == drafted:
                self._length = min(self._most, self._length * 2)
            else:
                self._length = max(min(self._most, 2), accepted)

    def _lookup(self, tokens: list[int]) -> int | None:
        """Position after the latest earlier occurrence of the last tokens."""
        # The n-gram that ends the text is looked up before it is indexed: it must not find itself.
        for end in range(self._indexed + 1, len(tokens)):
            for size in _NGRAMS:
                if end >= size:
                    self._next[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for size in _NGRAMS:
            found = self._next.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if found is not None:
                return found
        return None
