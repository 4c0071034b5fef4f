"""One request of a user: its prompt, its completions, and what it gives back, all at once or as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.config import AutoDraft
from longdraft.core import Sequence as EngineSequence
from longdraft.core import Status, StepOutput, sum_by_position
from longdraft.engine.detokenize import Detokenizer
from longdraft.outputs import CompletionOutput, ControlStats, Logprob, RequestOutput, RequestStats, StreamOutput
from longdraft.prompts import EncodedPrompt
from longdraft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from longdraft.llm import LLM

Sink = Callable[[StreamOutput], None]


class TextStream:
    """The text of one completion, piece by piece: whole characters only, and nothing that may be part of a stop."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        skip = params.skip_special_tokens
        self._text = Detokenizer(tokenizer, skip_special_tokens=skip) if tokenizer else None
        self._stops = params.stop
        self._sent = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that can be shown now that ``tokens`` have come and did not end the completion."""
        if self._text is None:
            return ""
        for token in tokens:
            self._text.push(token)
        return self._send(self._text.text, len(self._text.text) - self._held_back(self._text.text))

    def finish(self, text: str) -> str:
        """The rest of the completion's whole ``text``."""
        return self._send(text, len(text))

    def _send(self, text: str, stop: int) -> str:
        new = text[self._sent : max(stop, self._sent)]
        self._sent += len(new)
        return new

    def _held_back(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            sizes = range(min(len(stop) - 1, len(text)), longest, -1)
            longest = next((n for n in sizes if text.endswith(stop[:n])), longest)
        return longest


@dataclass(eq=False)
class Request:
    """A prompt and its ``n`` sequences in the engine. ``sink`` is told what each step adds, where there is one."""

    prompt: EncodedPrompt
    sequences: list[EngineSequence]
    tokenizer: Tokenizer | None
    exactness: str
    sink: Sink | None = None
    _texts: dict[int, TextStream] = field(init=False)

    def __post_init__(self) -> None:
        self._texts = {seq.id: TextStream(self.tokenizer, seq.params) for seq in self.sequences}

    @property
    def done(self) -> bool:
        """Whether all completions have ended."""
        return all(seq.status is Status.FINISHED for seq in self.sequences)

    def take(self, output: StepOutput) -> None:
        """Pass on what a step gave one of the sequences."""
        if self.sink is None:
            return
        seq, reason = output.seq, output.finish_reason
        text = self._texts.pop(seq.id) if reason else self._texts[seq.id]
        shown = text.finish(output_text(self.tokenizer, seq)) if reason else text.push(output.tokens)
        logprobs = None
        if seq.params.logprobs is not None:
            count = len(seq.output_ids) - len(output.tokens)
            logprobs = [self._decoded(entry) for entry in seq.logprobs[count:]]
        result = None if self._texts else self.result()  # several may end in one step: with the last of them
        index = self.sequences.index(seq)
        self.sink(StreamOutput(index, shown, output.tokens, logprobs, reason, seq.error, result))

    def result(self) -> RequestOutput:
        """Everything, as far as it has come."""
        first = self.sequences[0]
        ids = first.ids[: first.num_prompt]
        outputs = [self._completion(i, seq) for i, seq in enumerate(self.sequences)]
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._decoded(entry) for entry in first.prompt_logprobs)]
        return RequestOutput(self.prompt.text, ids, outputs, _stats(self.sequences), self.exactness, prompt_logprobs)

    def _completion(self, index: int, seq: EngineSequence) -> CompletionOutput:
        logprobs = None if seq.params.logprobs is None else [self._decoded(entry) for entry in seq.logprobs]
        text, reason = output_text(self.tokenizer, seq), str(seq.finish_reason)
        return CompletionOutput(index, text, seq.output_ids, reason, seq.error, logprobs)

    def _decoded(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        if self.tokenizer is None:
            return entry
        decode = self.tokenizer.decode
        return {i: replace(x, decoded_token=decode([i], skip_special_tokens=False)) for i, x in entry.items()}


class Stream(Iterator[StreamOutput]):
    """The outputs of one request as they come. Each ``next`` runs the engine until there is one."""

    def __init__(self, llm: LLM, prompt: EncodedPrompt, params: SamplingParams | None, draft: object) -> None:
        """``draft``: as in ``LLM.submit``."""
        self._llm = llm
        self._outputs: deque[StreamOutput] = deque()
        self._request = llm.submit(prompt, params, self._outputs.append, draft)

    def __next__(self) -> StreamOutput:
        while not self._outputs:
            if self._request.done:
                raise StopIteration
            self._llm.step()
        return self._outputs.popleft()

    def close(self) -> None:
        """End the request now; its last output, with ``finish_reason`` ``abort``, can still be read."""
        self._llm.abort(self._request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_request"):  # it was accepted
            self.close()


def output_text(tokenizer: Tokenizer | None, seq: EngineSequence) -> str:
    """The text of a sequence's output, up to a stop string if one ended it; empty without a tokenizer."""
    if seq.stop_text is not None:
        return seq.stop_text
    if tokenizer is None:
        return ""
    return tokenizer.decode(seq.output_ids, skip_special_tokens=seq.params.skip_special_tokens)


def _stats(sequences: list[EngineSequence]) -> RequestStats:
    """Counts add up over the completions; seconds are those of the one that took longest, since they run together."""
    each = [seq.stats for seq in sequences]
    return RequestStats(
        prompt_tokens=sequences[0].num_prompt,
        output_tokens=sum(len(seq.output_ids) for seq in sequences),
        prefill_s=max(s.prefill_s for s in each),
        decode_s=max(s.decode_s for s in each),
        preemptions=sum(s.preemptions for s in each),
        decode_tokens=sum(s.decode_tokens for s in each),
        draft_s=max(s.draft_s for s in each),
        verify_passes=sum(s.verify_passes for s in each),
        drafted_by_position=tuple(sum_by_position(s.drafted for s in each)),
        accepted_by_position=tuple(sum_by_position(s.accepted for s in each)),
        control=ControlStats.total(s.control for s in each) if isinstance(sequences[0].draft, AutoDraft) else None,
    )
