"""The asyncio API on a tiny model: results as LLM's own, and nothing left behind however a request ends."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import longdraft.async_llm
from longdraft import LLM, AsyncLLM, DraftConfig, SamplingParams
from longdraft.errors import ContextLengthError, InvalidValueError, LongDraftError, TemplateError
from tests.parity.models import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
DRAFT = DraftConfig(kv="streaming_llm", budget=16, sinks=4, gamma=3)
PROMPT = [5, 6, 7]
TEMPLATE = (
    "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no such talk') }}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that speaks bytes, so that characters are spread over tokens."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", vocab_size=272)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    return LLM(folder, None, dtype="float64", kv_cache_memory_bytes=2**22)


@pytest.fixture(scope="module")
def drafted(folder):
    return LLM(folder, DRAFT, dtype="float64", kv_cache_memory_bytes=2**22)


@pytest.fixture(params=["plain", "drafted"])
def either(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def llm(plain):
    yield plain
    assert is_clean(plain)


def is_clean(llm):
    engine = llm.engine
    return not (engine.num_unfinished or llm._requests) and engine.store.num_free_pages == engine.store.num_pages


def serve(llm, main):
    """``main(AsyncLLM)`` in an event loop of its own."""

    async def limited():
        async with AsyncLLM.of(llm) as served:
            return await asyncio.wait_for(main(served), 60)

    return asyncio.run(limited())


async def until(condition, seconds=20):
    """Wait until ``condition()`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.001)


def tokens(result):
    return [(o.token_ids, o.text, o.finish_reason) for o in result.outputs]


class Gate:
    """Lets the engine run as many steps as a test allows; notes what is submitted and how many rows a step has."""

    def __init__(self, llm, monkeypatch):
        self.steps, self.waiting, self.submitted, self.most = threading.Semaphore(0), threading.Event(), [], 0
        self._step, self._submit = llm.step, llm.submit
        monkeypatch.setattr(llm, "step", self.step)
        monkeypatch.setattr(llm, "submit", self.submit)

    def step(self):
        self.waiting.set()
        assert self.steps.acquire(timeout=10)
        self.waiting.clear()
        outputs = self._step()
        self.most = max(self.most, len(outputs))
        return outputs

    def submit(self, prompt, *rest):
        self.submitted.append(prompt.ids)
        return self._submit(prompt, *rest)

    def open(self):
        self.steps.release(10_000)

    async def handed_over(self, served, n):
        """Wait until ``n`` requests are in the engine or in the queue before it."""
        await until(lambda: len(self.submitted) + served._thread._commands.qsize() >= n)

    async def allow(self, steps):
        """Run ``steps`` of them; the next one waits when this returns."""
        for _ in range(steps):
            await until(self.waiting.is_set)
            self.waiting.clear()
            self.steps.release()
        await until(self.waiting.is_set)


@pytest.fixture
def gate(llm, monkeypatch):
    gate = Gate(llm, monkeypatch)
    yield gate
    gate.open()


# --- the same results -------------------------------------------------------------------------------------------------

REQUESTS = [
    (PROMPT, GREEDY),
    (list(range(60)), GREEDY),
    ([9], SamplingParams(seed=1, max_tokens=20)),
    ("Hello, wörld", SamplingParams(seed=2, max_tokens=9, temperature=0.7, top_k=20, logprobs=2, prompt_logprobs=1)),
    ({"prompt": "Hello"}, SamplingParams(seed=3, n=3, max_tokens=15)),
    ({"prompt_token_ids": [8, 8, 8]}, SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.3)),
]


def test_concurrent_requests_equal_generate(either, monkeypatch):
    want = [either.generate(prompt, params)[0] for prompt, params in REQUESTS]
    gate = Gate(either, monkeypatch)

    async def main(served):
        tasks = [asyncio.create_task(served.agenerate(*request)) for request in REQUESTS]
        await gate.handed_over(served, len(REQUESTS))
        gate.open()
        return await asyncio.gather(*tasks)

    got = serve(either, main)
    assert [tokens(r) for r in got] == [tokens(r) for r in want]
    assert [(r.prompt, r.prompt_token_ids) for r in got] == [(r.prompt, r.prompt_token_ids) for r in want]
    assert [len(r.outputs) for r in got] == [1, 1, 1, 1, 3, 1]
    assert len(got[3].outputs[0].logprobs) == len(got[3].outputs[0].token_ids)
    assert len(got[3].prompt_logprobs) == len(got[3].prompt_token_ids)
    assert gate.most >= 6  # they ran together
    assert (sum(r.stats.drafted for r in got) > 0) == (either.draft is not None)
    assert is_clean(either)


def test_chat_and_default_params(llm):
    talk = [{"role": "user", "content": "Hi 🙂"}]
    want = llm.chat(talk, GREEDY)[0]
    assert want.prompt_token_ids == llm.encode("[user]Hi 🙂")

    async def main(served):
        result = await served.achat(talk, GREEDY)
        streamed = [output async for output in served.astream_chat(talk, GREEDY)]
        default = await served.agenerate(PROMPT)
        return result, streamed[-1].result, default

    result, streamed, default = serve(llm, main)
    assert tokens(result) == tokens(streamed) == tokens(want)
    assert result.prompt_token_ids == streamed.prompt_token_ids == want.prompt_token_ids
    assert len(default.outputs[0].token_ids) == llm.default_sampling_params.max_tokens


@pytest.mark.parametrize("n", [1, 3])
def test_streams_joined_are_the_result(either, n):
    sampled = SamplingParams(seed=4, n=n, max_tokens=40, ignore_eos=True, logprobs=1)
    text = either.generate(PROMPT, sampled)[0].text
    stopped = SamplingParams(seed=4, n=n, max_tokens=40, ignore_eos=True, stop=text[7:9])
    requests = [sampled, stopped]
    want = [either.generate(PROMPT, params)[0] for params in requests]
    assert want[0].text.startswith(want[1].text) and want[1].outputs[0].finish_reason == "stop"

    async def read(served, params):
        return [output async for output in served.astream(PROMPT, params)]

    async def main(served):
        return await asyncio.gather(*(read(served, params) for params in requests))

    for outputs, result in zip(serve(either, main), want, strict=True):
        joined = [[o for o in outputs if o.index == i] for i in range(n)]
        assert [sum((o.token_ids for o in own), []) for own in joined] == [o.token_ids for o in result.outputs]
        assert ["".join(o.text for o in own) for own in joined] == [o.text for o in result.outputs]
        assert [own[-1].finish_reason for own in joined] == [o.finish_reason for o in result.outputs]
        assert all(o.finish_reason is None for own in joined for o in own[:-1])
        assert [i for i, o in enumerate(outputs) if o.result] == [len(outputs) - 1]  # one result, with the last output
        assert tokens(outputs[-1].result) == tokens(result)
        assert len(joined[0]) > 2
    assert is_clean(either)


def test_the_constructor_loads(folder):
    async def main():
        async with AsyncLLM(folder, DRAFT, dtype="float64", kv_cache_memory_bytes=2**22) as served:
            assert repr(served).startswith("AsyncLLM(")
            return served.llm, await served.agenerate(PROMPT, GREEDY)

    llm, result = asyncio.run(main())
    assert result.stats.drafted > 0
    assert tokens(result) == tokens(llm.generate(PROMPT, GREEDY)[0])


def test_only_an_idle_llm_is_taken_over(llm):
    with pytest.raises(InvalidValueError, match="must be an LLM"):
        AsyncLLM.of("model")
    with llm.stream(PROMPT, GREEDY), pytest.raises(InvalidValueError, match="unfinished"):
        AsyncLLM.of(llm)


# --- the ways a request ends early ------------------------------------------------------------------------------------


def test_cancelled_before_it_is_submitted(llm, gate):
    async def main(served):
        first = asyncio.create_task(served.agenerate(PROMPT, GREEDY))
        await until(gate.waiting.is_set)
        second = asyncio.create_task(served.agenerate([1, 2], GREEDY))
        await gate.handed_over(served, 2)  # it lies in the queue while a step runs
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.open()
        return await first

    result = serve(llm, main)
    assert gate.submitted == [PROMPT]
    assert tokens(result) == tokens(llm.generate(PROMPT, GREEDY)[0])


def test_cancelled_while_it_is_encoded(llm, gate, monkeypatch):
    go, encode = threading.Event(), longdraft.async_llm.encode

    def slow(prompt, tokenizer):
        assert prompt != "slow" or go.wait(30)
        return encode(prompt, tokenizer)

    monkeypatch.setattr(longdraft.async_llm, "encode", slow)
    gate.open()

    async def main(served):
        task = asyncio.create_task(served.agenerate("slow", GREEDY))
        stream = served.astream("slow", GREEDY)
        read = asyncio.create_task(anext(stream))
        # Neither the event loop nor the engine waits for an encoder: else this would never return.
        result = await served.agenerate("fast", GREEDY)
        task.cancel()
        await stream.aclose()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(StopAsyncIteration):
            await read
        await served.agenerate("last", GREEDY)
        return result

    assert len(serve(llm, main).outputs[0].token_ids) == 12
    assert gate.submitted == [llm.encode("fast"), llm.encode("last")]


def test_cancelled_while_it_waits_or_runs(llm, gate, monkeypatch):
    monkeypatch.setattr(llm.engine.scheduler, "config", replace(llm.engine.config, max_num_seqs=2))

    async def main(served):
        async def start(prompt, params):
            task = asyncio.create_task(served.agenerate(prompt, params))
            await asyncio.sleep(0)
            return task

        other, victim, waiting = [await start(p, LONG) for p in (PROMPT, [1] * 40, [2] * 40)]
        await gate.allow(6)
        assert len(gate.submitted) == 3
        assert len(llm.engine.scheduler.waiting) == 1
        held = llm.engine.store.num_free_pages
        victim.cancel()
        waiting.cancel()
        await gate.allow(1)
        assert llm.engine.num_unfinished == 1
        assert llm.engine.store.num_free_pages >= held + 2
        gate.open()
        ends = await asyncio.gather(victim, waiting, return_exceptions=True)
        assert [type(e) for e in ends] == [asyncio.CancelledError] * 2
        return await other

    assert tokens(serve(llm, main)) == tokens(llm.generate(PROMPT, LONG)[0])


async def leave_by_break(served):
    async for _ in served.astream([1] * 40, LONG):
        break


async def leave_by_drop(served):
    stream = served.astream([1] * 40, LONG)
    await anext(stream)
    del stream


async def leave_by_close(served):
    stream = served.astream([1] * 40, LONG)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def leave_by_block(served):
    with pytest.raises(ZeroDivisionError):
        async with served.astream([1] * 40, LONG) as stream:
            await anext(stream)
            raise ZeroDivisionError


async def leave_by_cancel(served):
    stream = served.astream([1] * 40, LONG)

    async def read():
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await until(lambda: served.llm.engine.num_unfinished == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


LEAVE = [leave_by_break, leave_by_drop, leave_by_close, leave_by_block, leave_by_cancel]


@pytest.mark.parametrize("leave", LEAVE, ids=lambda f: f.__name__)
def test_a_stream_that_is_left(llm, monkeypatch, leave):
    step = llm.step

    def slowly():
        time.sleep(0.03)  # so that a request that is not aborted is still there when the test gives up
        return step()

    monkeypatch.setattr(llm, "step", slowly)

    async def main(served):
        other = asyncio.create_task(served.agenerate(PROMPT, LONG))
        await until(lambda: llm.engine.num_unfinished == 1)
        await leave(served)
        await until(lambda: llm.engine.num_unfinished == 1, 1.5)
        monkeypatch.setattr(llm, "step", step)
        return await other

    assert tokens(serve(llm, main)) == tokens(llm.generate(PROMPT, LONG)[0])


def test_closing_a_stream_ends_the_read_under_way(llm, gate):
    async def main(served):
        stream = served.astream(PROMPT, LONG)
        task = asyncio.create_task(anext(stream))
        await gate.handed_over(served, 1)
        await until(gate.waiting.is_set)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(task, 5)  # no step has run
        gate.open()

    serve(llm, main)


def test_a_stream_that_is_never_read_costs_nothing(llm, gate):
    async def main(served):
        served.astream(PROMPT, GREEDY)
        served.astream("x" * 10_000)

    serve(llm, main)
    assert gate.submitted == []


def test_a_slow_reader_holds_up_nobody(llm):
    async def main(served):
        stream = served.astream(PROMPT, LONG)
        first = await anext(stream)
        other = await served.agenerate([1, 2], LONG)
        rest = [output async for output in stream]
        return [first, *rest], other

    outputs, other = serve(llm, main)
    assert len(other.outputs[0].token_ids) == 100
    assert sum((o.token_ids for o in outputs), []) == llm.generate(PROMPT, LONG)[0].outputs[0].token_ids


# --- errors -----------------------------------------------------------------------------------------------------------

BAD = [
    ([300], GREEDY, InvalidValueError, "vocabulary"),
    ([], GREEDY, InvalidValueError, "at least one"),
    (None, GREEDY, InvalidValueError, "prompt"),
    (["a", "b"], GREEDY, InvalidValueError, "prompt"),
    ([1] * 256, GREEDY, ContextLengthError, "256"),
    (PROMPT, "greedy", InvalidValueError, "sampling_params"),
    (PROMPT, [GREEDY, GREEDY], InvalidValueError, "sampling_params"),
    (PROMPT, SamplingParams(stop_token_ids=(500,)), InvalidValueError, "stop_token_ids"),
]


def test_what_is_unusable_raises_in_its_caller(llm):
    async def main(served):
        good = asyncio.create_task(served.agenerate(PROMPT, LONG))
        for prompt, params, error, words in BAD:
            with pytest.raises(error, match=words):
                await served.agenerate(prompt, params)
            stream = served.astream(prompt, params)
            with pytest.raises(error, match=words):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        with pytest.raises(InvalidValueError, match="messages"):
            await served.achat("hi", GREEDY)
        with pytest.raises(TemplateError, match="no such talk"):
            await served.achat([{"role": "user", "content": "bad"}], GREEDY)
        with pytest.raises(TemplateError, match="no such talk"):
            await anext(served.astream_chat([{"role": "user", "content": "bad"}], GREEDY))
        return await good

    assert tokens(serve(llm, main)) == tokens(llm.generate(PROMPT, LONG)[0])


class Broken(Exception):
    """A step that fails."""


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after one ended"])
def test_a_step_that_fails_ends_those_in_flight_alone(llm, gate, monkeypatch, late):
    """``late``: the engine has ended a request in that step, but nobody was told."""
    short = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    owner, name = (llm, "_deliver") if late else (llm.engine, "step")
    original = getattr(owner, name)

    def fail(*args):
        if late and not any(output.finish_reason for output in args[0]):
            return original(*args)
        monkeypatch.setattr(owner, name, original)
        raise Broken

    async def main(served):
        stream = served.astream([4], SamplingParams(n=3, max_tokens=100, ignore_eos=True))
        calls = [served.agenerate(PROMPT, LONG), served.agenerate([1, 2], short), anext(stream)]
        tasks = [asyncio.create_task(call) for call in calls]
        await gate.handed_over(served, 3)
        await gate.allow(4)
        await tasks.pop()
        tasks.append(asyncio.create_task(read_all(stream)))
        monkeypatch.setattr(owner, name, fail)
        later = served.agenerate([7, 7], GREEDY)
        if not late:
            later = asyncio.create_task(later)
            await gate.handed_over(served, 4)  # in the queue while the step fails
        gate.open()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [Broken] * 3
        assert is_clean(llm) or not late
        return await later

    assert tokens(serve(llm, main)) == tokens(llm.generate([7, 7], GREEDY)[0])


async def read_all(stream):
    return [output async for output in stream]


def test_a_result_that_cannot_be_decoded_hurts_its_caller_alone(llm, monkeypatch):
    decode = llm.tokenizer.decode

    def fail(ids, **options):
        if len(ids) == 5:
            raise Broken
        return decode(ids, **options)

    monkeypatch.setattr(llm.tokenizer, "decode", fail)

    async def main(served):
        five = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        return await asyncio.gather(
            served.agenerate([1, 2], five), served.agenerate(PROMPT, GREEDY), return_exceptions=True
        )

    bad, good = serve(llm, main)
    assert type(bad) is Broken
    assert len(good.outputs[0].token_ids) == 12


def test_a_thread_that_dies_leaves_nobody_waiting(llm, gate, monkeypatch, caplog):
    def die():
        raise SystemExit(3)

    monkeypatch.setattr(llm.engine, "step", die)

    async def main(served):
        tasks = [asyncio.create_task(served.agenerate(PROMPT, LONG))]
        await until(gate.waiting.is_set)
        tasks.append(asyncio.create_task(served.agenerate([1, 2], LONG)))
        await until(lambda: not served._thread._commands.empty())  # behind the step that kills
        gate.open()
        for task in tasks:
            with pytest.raises(LongDraftError, match=r"SystemExit\(3\)"):
                await asyncio.wait_for(task, 20)
        with pytest.raises(LongDraftError, match=r"SystemExit\(3\)"):
            await served.agenerate(PROMPT, GREEDY)
        with pytest.raises(LongDraftError, match=r"SystemExit\(3\)"):
            await anext(served.astream(PROMPT, GREEDY))

    serve(llm, main)
    assert "engine thread ends" in caplog.text


# --- event loops, threads, the end ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of asyncio, about its closed loop
@pytest.mark.parametrize("kind", ["stream", "task"])
def test_a_closed_loop_loses_its_own_requests_only(llm, gate, kind):
    served = AsyncLLM.of(llm)

    async def start():
        if kind == "stream":
            stream = served.astream([1] * 40, LONG)
            read = asyncio.create_task(anext(stream))
            await gate.allow(1)
            await read
            return stream
        task = asyncio.create_task(served.agenerate([1] * 40, GREEDY))
        await gate.allow(1)
        return task

    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(start())  # keeps it from ending because nobody holds it
    loop.close()
    gate.open()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    async def main():
        result = await served.agenerate(PROMPT, params)
        assert is_clean(llm)
        await served.close()
        return result

    assert tokens(asyncio.run(main())) == tokens(llm.generate(PROMPT, params)[0])
    if kind == "task":
        kept._log_destroy_pending = False  # nor a line in the log
    del kept
    gc.collect()


def test_two_event_loops_in_two_threads(llm, gate):
    served, both = AsyncLLM.of(llm), threading.Barrier(3)

    async def main(first):
        calls = [served.agenerate([first, i], LONG) for i in range(3)]
        tasks = [asyncio.create_task(call) for call in calls]
        await gate.handed_over(served, 6)
        await asyncio.to_thread(both.wait, 30)
        outputs = await read_all(served.astream([first], LONG))
        return [*await asyncio.gather(*tasks), outputs[-1].result]

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(asyncio.run, main(first)) for first in (10, 20)]
        both.wait(30)
        gate.open()
        got = [future.result(60) for future in running]
    asyncio.run(served.close())
    for first, results in zip((10, 20), got, strict=True):
        want = llm.generate([[first, 0], [first, 1], [first, 2], [first]], LONG)
        assert [tokens(r) for r in results] == [tokens(r) for r in want]
    assert gate.most >= 6


def test_close_ends_what_is_in_flight(llm, gate):
    async def main():
        served = AsyncLLM.of(llm)
        task = asyncio.create_task(served.agenerate(PROMPT, LONG))
        stream = served.astream([1] * 40, LONG)
        await until(gate.waiting.is_set)
        read = asyncio.create_task(read_all(stream))
        await until(lambda: not served._thread._commands.empty())
        await gate.allow(2)
        queued = asyncio.create_task(served.agenerate([9], LONG))
        await until(lambda: not served._thread._commands.empty())
        closing = asyncio.create_task(served.close())
        await asyncio.sleep(0)
        gate.steps.release()
        await asyncio.wait_for(closing, 20)
        assert not served._thread._thread.is_alive()
        assert is_clean(llm)
        for late in (task, read):
            with pytest.raises(InvalidValueError, match="closed"):
                await asyncio.wait_for(late, 20)
        with pytest.raises(InvalidValueError, match="closed"):
            await asyncio.wait_for(queued, 20)
        await served.close()
        uses = [lambda: served.agenerate(PROMPT, GREEDY), lambda: anext(served.astream(PROMPT, GREEDY))]
        for use in [*uses, lambda: served.achat([{"role": "user", "content": "Hi"}])]:
            with pytest.raises(InvalidValueError, match="closed"):
                await asyncio.wait_for(use(), 20)

    asyncio.run(main())
    gate.open()
    assert llm.generate(PROMPT, GREEDY)  # it is free again


def test_what_comes_after_the_last_look_is_refused(llm):
    """A caller that saw it open may hand over its request too late for the thread to answer."""

    async def main():
        served = AsyncLLM.of(llm)
        await served.close()
        job = longdraft.async_llm._Job(None, GREEDY, False)
        with pytest.raises(InvalidValueError, match="closed"):
            served._thread.put(job)
        served._thread._over = False  # as in a forked process, which has no such thread
        with pytest.raises(LongDraftError, match="forked"):
            await served.agenerate(PROMPT, GREEDY)

    asyncio.run(main())


def test_a_dropped_one_frees_the_model(folder):
    async def main():
        served = AsyncLLM(folder, dtype="float64", kv_cache_memory_bytes=2**22)
        stream = served.astream(PROMPT, LONG)
        await anext(stream)
        thread, model = served._thread._thread, weakref.ref(served.llm)
        del served
        assert (await anext(stream)).token_ids  # a stream keeps it
        del stream
        gc.collect()
        await until(lambda: not thread.is_alive())
        return model

    model = asyncio.run(main())
    gc.collect()
    assert model() is None


SCRIPT = """
import asyncio, sys
from longdraft import AsyncLLM, SamplingParams
served = AsyncLLM(sys.argv[1], kv_cache_memory_bytes=2**22)
loop = asyncio.new_event_loop()
stream = served.astream([1, 2, 3], SamplingParams(max_tokens=250, ignore_eos=True))
print(loop.run_until_complete(anext(stream)).index)
"""


def test_a_program_that_never_closes_it_ends(folder):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("Running on PyTorch's kernels")]
    assert (done.returncode, done.stdout.split(), errors) == (0, ["0"], [])
