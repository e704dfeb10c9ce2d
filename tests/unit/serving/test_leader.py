"""Random requests to a leader whose ranks are simulated: answers, what is computed, bounds, order, failures."""

import itertools
import random

import pytest

from megakv.serving.prefix_node import walk
from megakv.serving.settings import ServingSettings
from tests.unit.serving.simulated import VOCABULARY, Machine, Simulation, next_token


def tokens(count: int) -> tuple[int, ...]:
    return tuple(random.choices(range(VOCABULARY), k=count))


def random_prompt(known: list[tuple[int, ...]], most: int = 120) -> tuple[int, ...]:
    """Often the beginning of an earlier one."""
    prompt = tokens(random.randint(1, 40))
    if known and random.random() < 0.7:
        before = random.choice(known)
        prompt = before[: random.randint(0, len(before))] + prompt
    return prompt[:most]


def unbounded(prompts: list[tuple[int, ...]]) -> int:
    """Prompt tokens that a cache without bounds does not have when they come one after the other."""
    seen: set[tuple[int, ...]] = set()
    computed = 0
    for prompt in prompts:
        found = next(n for n in range(len(prompt) - 1, -1, -1) if n == 0 or prompt[:n] in seen)
        computed += len(prompt) - found
        seen |= {prompt[:n] for n in range(1, len(prompt) + 1)}
    return computed


@pytest.mark.parametrize(
    ("kv_tokens", "host", "disk", "copies"),
    [
        *((None, 0, 0, None), (300, 0, 0, None), (300, 200, 0, None), (300, 100, 500, None), (200, 0, 10_000, None)),
        *((300, 0, 0, 200), (200, 100, 500, 50)),
    ],
)
def test_answers_are_those_of_the_model_alone(kv_tokens: int | None, host: int, disk: int, copies: int | None) -> None:
    settings = ServingSettings(kv_tokens=kv_tokens, host_kv_tokens=host, max_sequences=5)
    simulation = Simulation(settings, disk=disk, copies=copies)
    known: list[tuple[int, ...]] = []
    names: list[str] = []
    for number in range(150):
        for _ in range(random.randint(0, 3)):
            name = f"r{number}-{len(names)}"
            prompt = random_prompt(known)
            options = {"priority": random.randint(0, 2), "user": random.choice("abc")}
            stream = simulation.submit(name, prompt, random.randint(1, 12), compresses=random.random() < 0.2, **options)
            names.append(name)
            known = [*known[-20:], prompt + tuple(stream.tokens)]
        for _ in range(random.randint(0, 6)):
            simulation.step()
        if names and random.random() < 0.2:
            simulation.leader.cancel(random.choice(names))
        if simulation.files and random.random() < 0.1:
            simulation.breaks.append(random.choice(list(simulation.files)))
        if random.random() < 0.03:
            simulation.step(fails=True)
        if kv_tokens is not None and copies is None:
            assert simulation.tree.held["device"] <= kv_tokens
    simulation.run()
    simulation.check_answers()
    why = [stream.finished.why for stream in simulation.streams.values() if stream.finished is not None]
    assert why.count("length") > 100
    assert not simulation.caches
    assert simulation.tree.used_tokens == 0
    assert simulation.leader.counts.requests == len(names)
    progress = [each for stream in simulation.streams.values() for each in stream.progress]
    assert all(each.cached <= each.read <= each.total for each in progress)


@pytest.mark.parametrize("copies", [None, 400])
def test_what_is_looked_up_changes_no_answer_and_takes_fewer_passes(copies: int | None) -> None:
    """Whoever is cancelled, preempted, or part of a pass that fails."""
    passes, proposed = [], []
    for most in (0, 12):
        random.seed(5)
        settings = ServingSettings(kv_tokens=900, max_sequences=5, prompt_lookup=most)
        simulation = Simulation(settings, copies=copies, quotes=17)
        for number in range(60):
            options = {"priority": random.randint(0, 1), "compresses": random.random() < 0.2}
            options["prompt_lookup"] = random.choice([None, None, 5])
            options["stop_ids"] = frozenset(random.sample(range(VOCABULARY), random.choice([0, 1])))
            simulation.submit(str(number), tokens(random.randint(1, 60)), random.randint(1, 80), **options)
            for _ in range(random.randint(0, 12)):
                simulation.step()
            if random.random() < 0.1:
                simulation.leader.cancel(str(random.randrange(number + 1)))
            if random.random() < 0.05:
                simulation.step(fails=True)
        simulation.run()
        simulation.check_answers()
        assert not simulation.caches and simulation.tree.used_tokens == 0
        counts = simulation.leader.counts
        passes.append(counts.passes / counts.new_tokens)
        proposed.append((counts.proposed_tokens, counts.accepted_tokens))
    assert proposed[0] == (0, 0) and proposed[1][0] > proposed[1][1] > 100
    assert passes[1] < 0.9 * passes[0]


@pytest.mark.parametrize("copies", [None, 900])
def test_log_probabilities_of_prompts_come_once_and_behind_their_own_tokens(copies: int | None) -> None:
    """Beside others with the same tokens, and whoever waits again or is part of a pass that fails."""
    settings = ServingSettings(kv_tokens=900, max_sequences=5, prompt_lookup=4, chunk_tokens=200)
    simulation, prompts = Simulation(settings, copies=copies, quotes=17), [tokens(count) for count in (1, 2, 90, 300)]
    for number in range(60):
        options = {"priority": random.randint(0, 1), "prompt_logprobs": random.choice([None, 1])}
        new = random.choice([0, 0, 1, 9])
        simulation.submit(str(number), random.choice(prompts), new, **options)
        for _ in range(random.randint(0, 6)):
            simulation.step(fails=random.random() < 0.05)
    simulation.run()
    simulation.check_answers()
    whole = 0
    for stream in simulation.streams.values():
        prompt = stream.prompt
        assert stream.finished is not None
        if stream.finished.why == "length" and stream.scores:
            whole += 1
            assert len(stream.scores) == len(prompt) - 1
        for at, token in enumerate(stream.scores, 1):
            assert token.id == prompt[at] and token.top[0][0] == next_token(prompt[:at], 17)
    assert whole > 5
    assert not simulation.caches and simulation.tree.used_tokens == 0


@pytest.mark.parametrize("quotes", [0, 23])
def test_an_answer_takes_no_longer_where_it_repeats_nothing(quotes: int) -> None:
    seconds = []
    for most in (0, 16):
        random.seed(7)
        simulation = Simulation(ServingSettings(prompt_lookup=most), quotes=quotes)
        simulation.submit("one", tokens(200), 1000)
        simulation.run()
        simulation.check_answers()
        seconds.append(simulation.now)
    assert seconds[0] / seconds[1] > (1.8 if quotes else 0.97)


def test_an_answer_may_be_looked_up_in_less_or_not_at_all() -> None:
    for given, most in ((0, 0), (3, 3), (50, 12)):
        simulation, counts = Simulation(ServingSettings(prompt_lookup=12), quotes=9), [0]
        simulation.submit("one", tokens(40), 300, prompt_lookup=given)
        while simulation.step():
            counts.append(simulation.leader.counts.proposed_tokens)
        simulation.check_answers()
        widest = max(after - before for before, after in itertools.pairwise(counts))
        assert 0 < widest <= most if most else widest == 0


def test_peaks_are_those_of_any_moment() -> None:
    """Also of one between two looks at them, as all are when a server that answers at once is looked at seldom."""
    simulation = Simulation(ServingSettings(max_sequences=3))
    counts = simulation.leader.counts
    simulation.submit("alone", tokens(20), 2)
    simulation.run()
    assert (counts.waiting_max, counts.running_max) == (0, 1)
    for number in range(8):
        simulation.submit(str(number), tokens(20), 2)
    simulation.run()
    assert (counts.waiting_max, counts.running_max) == (5, 3)
    simulation.submit("later", tokens(20), 2)
    simulation.run()
    assert (counts.waiting_max, counts.running_max) == (5, 3)


def test_an_answer_that_fails_alone_takes_no_other_with_it() -> None:
    simulation = Simulation(ServingSettings(), copies=1000)
    streams = [simulation.submit(str(number), tokens(20), 5) for number in range(3)]
    for _ in range(2):
        simulation.step(fails=True)
    simulation.run()
    assert [stream.finished.why for stream in streams if stream.finished] == ["error", "length", "length"]


def test_what_is_computed_is_what_an_unbounded_cache_would() -> None:
    """However many requests come at a time."""
    simulation = Simulation(ServingSettings(max_sequences=16))
    known: list[tuple[int, ...]] = []
    prompts = []
    for number in range(300):
        prompt = random_prompt(known, 400)
        prompts.append(prompt)
        known = [*known[-20:], prompt]
        simulation.submit(str(number), prompt, random.randint(1, 4))
        for _ in range(random.choice([0, 0, 0, 1, 5])):
            simulation.step()
    simulation.run()
    simulation.check_answers()
    counts = simulation.leader.counts
    assert counts.prompt_tokens == sum(map(len, prompts)) == counts.hit_tokens + counts.computed_tokens
    # Beginnings that are shared by fewer tokens than are waited for may be computed twice.
    assert counts.computed_tokens <= 1.02 * unbounded(prompts) + 100


def test_a_prompt_that_is_being_read_is_not_read_twice() -> None:
    simulation = Simulation(ServingSettings(max_sequences=16))
    prompt = tokens(1000)
    for number in range(8):
        simulation.submit(str(number), prompt, 2)
        simulation.step()
    simulation.run()
    assert simulation.leader.counts.computed_tokens == 1000 + 7
    assert all(stream.progress[-1].cached == 999 for name, stream in simulation.streams.items() if name != "0")


def test_who_leaves_and_returns_goes_on_where_it_was() -> None:
    simulation = Simulation(ServingSettings())
    prompt = tokens(5000)
    stream = simulation.submit("first", prompt, 1)
    while not stream.progress or stream.progress[-1].read < 2700:
        simulation.step()
    simulation.leader.cancel("first")
    computed = simulation.leader.counts.computed_tokens
    again = simulation.submit("again", prompt, 1)
    simulation.run()
    assert again.progress[0].cached == computed
    assert simulation.leader.counts.computed_tokens == 5000
    simulation.check_answers()


def test_what_happens_while_long_prompts_are_read() -> None:
    """Newcomers, and those who leave, between two chunks: also those whose chunks they are."""
    simulation = Simulation(ServingSettings(max_gap_s=0.1), machine=Machine(token=0.001))
    known = [tokens(random.randint(1500, 3000)) for _ in range(3)]
    names: list[str] = []

    def submit() -> None:
        names.append(str(len(names)))
        prompt = random.choice(known)[: random.randint(1, 3000)] + tokens(random.randint(1, 30))
        simulation.submit(names[-1], prompt, random.randint(1, 30), priority=random.randint(0, 2))

    for _ in range(8):
        submit()
        while simulation.step(fails=random.random() < 0.01):
            if random.random() < 0.1 and len(names) < 60:
                submit()
            if random.random() < 0.05:
                simulation.leader.cancel(random.choice(names))
    simulation.check_answers()
    assert len(names) > 20 and not simulation.caches and simulation.tree.used_tokens == 0


def test_those_whose_caches_are_compressed_take_turns_with_others() -> None:
    """One pass of each between two of all others, beside a long prompt too; beginnings are not shared with them."""
    simulation = Simulation(ServingSettings(max_gap_s=0.3), most_mixed=0)
    prompt = tokens(60)
    alone = [simulation.submit(f"alone {n}", prompt, 40, compresses=True) for n in range(2)]
    others = [simulation.submit(f"other {n}", prompt, 40) for n in range(2)]
    for _ in range(16):
        simulation.step()
    assert all(stream.tokens for stream in (*alone, *others))
    simulation.submit("long", tokens(3000), 2)
    simulation.run()
    simulation.check_answers()
    assert all(stream.progress[-1].cached == 0 for stream in alone)
    # None of them waits for longer than others do, but for the passes of the two themselves.
    most = max(max(stream.gaps) for stream in others)
    assert max(max(stream.gaps) for stream in alone) <= most + 0.3


def test_higher_priority_is_served_first_and_users_take_turns() -> None:
    simulation = Simulation(ServingSettings(max_sequences=1))
    simulation.submit("now", tokens(5), 30, priority=3)
    simulation.step()
    order: list[str] = []
    for name, user, priority in [
        ("a1", "a", 0), ("a2", "a", 0), ("a3", "a", 0), ("b1", "b", 0), ("c1", "c", 1), ("b2", "b", 0),
    ]:  # fmt: skip
        simulation.submit(name, tokens(5), 2, user=user, priority=priority)
    while simulation.step():
        order += [each.request.id for each in simulation.leader.running if each.request.id not in order]
    assert order[0] == "now" or "now" not in order
    assert [name for name in order if name != "now"][0] == "c1"
    assert simulation.leader.counts.preempted == 0
    simulation.check_answers()


def test_the_user_with_least_running_is_next() -> None:
    simulation = Simulation(ServingSettings(max_sequences=4))
    for number in range(10):
        simulation.submit(f"a{number}", tokens(5), 50, user="a")
    for number in range(3):
        simulation.submit(f"b{number}", tokens(5), 50, user="b")
    simulation.step()
    assert sorted(each.user for each in simulation.leader.running) == ["a", "a", "b", "b"]


def test_a_request_of_higher_priority_takes_the_place_of_others_which_lose_nothing() -> None:
    simulation = Simulation(ServingSettings(kv_tokens=500, host_kv_tokens=500))
    low = simulation.submit("low", tokens(300), 50)
    for _ in range(20):
        simulation.step()
    assert low.tokens
    prompt = (low.prompt[0] + 1) % VOCABULARY, *tokens(399)
    high = simulation.submit("high", prompt, 5, priority=1)
    simulation.step()
    assert [each.request.id for each in simulation.leader.running] == ["high"]
    simulation.run()
    counts = simulation.leader.counts
    assert counts.preempted == 1
    # All but the token that comes next was kept.
    assert counts.computed_tokens == 700 + 1
    assert high.times[-1] < low.times[-1]
    simulation.check_answers()


def test_what_will_never_fit_is_refused() -> None:
    simulation = Simulation(ServingSettings(kv_tokens=100))
    stream = simulation.submit("large", tokens(90), 11)
    assert stream.finished is not None and stream.finished.why == "error"
    assert "kv_tokens = 100" in stream.finished.message
    fits = simulation.submit("fits", tokens(90), 10)
    simulation.run()
    assert fits.finished is not None and fits.finished.why == "length"


def test_an_answer_ends_at_its_stop_token() -> None:
    simulation = Simulation(ServingSettings())
    prompt = tokens(10)
    free = simulation.submit("free", prompt, 20)
    simulation.run()
    stop = free.tokens[7]
    stopped = simulation.submit("stopped", prompt, 20, stop_ids=frozenset([stop]))
    simulation.run()
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert stopped.finished is not None and stopped.finished.why == "stop"


def test_a_pass_that_failed_is_tried_again_once() -> None:
    simulation = Simulation(ServingSettings(), disk=10_000)
    stream = simulation.submit("it", tokens(100), 5)
    for _ in range(4):
        simulation.step()
    simulation.step(fails=True)
    simulation.run()
    assert stream.finished is not None and stream.finished.why == "length"
    simulation.check_answers()
    other = simulation.submit("other", tokens(100), 5)
    simulation.step()
    for _ in range(2):
        simulation.step(fails=True)
    assert other.finished is not None and other.finished.why == "error" and other.finished.message == "it failed"
    simulation.run()


def test_nothing_grows_with_the_number_of_requests() -> None:
    simulation = Simulation(ServingSettings(kv_tokens=300))
    for number in range(1500):
        simulation.submit(str(number), tokens(random.randint(1, 30)), 2)
        simulation.streams.clear()
        simulation.step()
        simulation.step()
    simulation.run()
    assert len(simulation.spans) == sum(1 for _ in walk(simulation.tree.root)) - 1 <= 300
    assert not simulation.caches and not simulation.leader._by_id
