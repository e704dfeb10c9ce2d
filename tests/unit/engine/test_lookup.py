"""What is looked up, against a search that looks at every place."""

import random

import pytest

from megakv.engine.lookup import TokenLookup


class Slow:
    """The same by comparing lists, from the first place on."""

    def __init__(self, most: int, ngram: int):
        self.most, self.ngram = most, ngram
        self.tokens: list[int] = []
        self.source = self.matched = 0

    def add(self, tokens: list[int]) -> tuple[int, bool]:
        before, known = list(self.tokens), self.tokens[self.source :] if self.matched else []
        self.tokens = before + tokens
        right = 0
        while right < min(len(known), len(tokens)) and known[right] == tokens[right]:
            right += 1
        missed = right < min(len(known), len(tokens))
        if right == len(tokens) and self.source + right + self.most <= len(self.tokens):
            self.source, self.matched = self.source + right, min(self.matched + right, self.ngram)
            return right, missed
        self.matched = 0
        for size in range(min(self.ngram, len(self.tokens) - 1), 0, -1):
            latest = self.tokens[-size:]
            places = [at for at in range(size, len(self.tokens)) if self.tokens[at - size : at] == latest]
            if places:
                self.matched, self.source = size, places[0]
                break
        return right, missed

    def guess(self, most: int, stops: set[int]) -> list[int]:
        found = self.tokens[self.source : self.source + most] if self.matched else []
        ends = [at for at, token in enumerate(found) if token in stops]
        return found[: ends[0]] if ends else found


@pytest.mark.parametrize("kinds", [2, 5, 40])
def test_it_finds_what_a_slow_search_does(kinds: int) -> None:
    most, ngram = random.randint(1, 9), random.randint(1, 6)
    lookup, slow = TokenLookup(most, ngram), Slow(most, ngram)
    assert lookup.guess(most) == [] and lookup.add([]) == (0, False)
    for _ in range(300):
        tokens = random.choices(range(kinds), k=random.choice([0, 1, 1, 1, 2, 5, 30]))
        if random.random() < 0.5:
            tokens = slow.guess(random.randint(1, 12), set()) + tokens[:1]
        assert lookup.add(tokens) == slow.add(tokens)
        assert (lookup.length, lookup.matched) == (len(slow.tokens), slow.matched)
        wanted, stops = random.randint(0, 12), set(random.sample(range(kinds), 1))
        assert lookup.guess(wanted, stops) == slow.guess(wanted, stops)


def test_it_goes_on_where_it_was_right_and_takes_the_longest_match() -> None:
    lookup = TokenLookup(3)
    lookup.add([1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 8, 8, 8, 8, 1, 2])
    assert lookup.matched == 2 and lookup.guess(3) == [3, 4, 5]
    assert lookup.add([3, 4]) == (2, False) and lookup.matched == 4 and lookup.guess(9, {7}) == [5, 6]
    # Behind 9, 2, 3 came another token than behind 1, 2, 3.
    assert lookup.add([9]) == (0, True) and lookup.guess(2) == [2, 3]
    assert lookup.add([2, 3]) == (2, False) and lookup.guess(1) == [8]
