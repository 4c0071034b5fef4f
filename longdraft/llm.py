"""The offline API: prompts in, results out; loops ``Engine.step``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from os import PathLike
from typing import Any

import torch

from longdraft.checkpoint.chat import encode_chat
from longdraft.checkpoint.load import fitting, load_checkpoint
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.checkpoint.tokenizer_folder import read_tokenizer
from longdraft.config import SamplingParams
from longdraft.core import Sequence as EngineSequence
from longdraft.core import Status, StepOutput
from longdraft.engine.engine import Engine
from longdraft.engine.sizing import resolve_device, resolve_dtype, size_engine
from longdraft.errors import InvalidValueError
from longdraft.models.transformer import Transformer
from longdraft.outputs import CompletionOutput, RequestOutput, RequestStats

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
OnStep = Callable[[Engine, list[StepOutput]], None]
log = logging.getLogger("longdraft")


class LLM:
    """A model ready to generate.

    Args:
        model: folder, GGUF file, hub id, or ``None`` for the embedded SmolLM2-135M-Instruct.
        dtype: type weights are stored and multiplied in: auto, float32, bfloat16, float64 (float16 becomes bfloat16).
        kv_dtype: type K and V are stored in; ``None`` is ``dtype``.
        device: auto, cpu or cuda.
        max_model_len: longest prompt + output in tokens; ``None`` is the model's own limit.
        max_num_seqs: most requests in flight at once; the rest wait.
        max_num_batched_tokens: prompt tokens per prefill step.
        kv_cache_memory_bytes: size of the KV cache; ``None`` is 40 % of the memory that the weights leave free.
        block_size: tokens per KV page.
        seed: what the seeds of unseeded requests are drawn from.
        tokenizer: folder with another ``tokenizer.json``; ``None`` is the model's own.
        download: allow the network for a hub id that is not cached.
        on_load: called as ``on_load(layers_done, layers)`` while weights are read.

    Raises ``ModelNotFoundError``, ``ModelFileError``, ``UnsupportedModelError``, ``InvalidValueError`` or
    ``KVCapacityError``.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        dtype: str = "auto",
        kv_dtype: str | None = None,
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 512,
        kv_cache_memory_bytes: int | None = None,
        block_size: int = 16,
        seed: int = 0,
        tokenizer: str | PathLike[str] | None = None,
        download: bool = False,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        self.checkpoint = load_checkpoint(model, download=download)
        self.tokenizer = self.checkpoint.tokenizer
        if tokenizer is not None:
            self.tokenizer = fitting(read_tokenizer(tokenizer), self.checkpoint.config, tokenizer)
        target_device = resolve_device(device)
        storage = resolve_dtype("dtype", dtype)
        kv_storage = storage if kv_dtype is None else resolve_dtype("kv_dtype", kv_dtype)
        engine_config = size_engine(
            self.checkpoint.config,
            storage,
            kv_storage,
            target_device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            seed=seed,
        )
        self.model = Transformer(
            self.checkpoint.config,
            self.checkpoint.weights,
            dtype=storage,
            kv_dtype=kv_storage,
            device=target_device,
            page_size=block_size,
            progress=on_load,
        )
        self.engine = Engine(self.model, engine_config, self.checkpoint.eos_token_ids)
        for warning in self.checkpoint.warnings:
            log.warning(warning)
        if engine_config.max_tokens_per_request < engine_config.max_model_len:
            log.warning(
                "The KV cache holds %d tokens, less than the model's context of %d: longer requests end there. "
                "Raise kv_cache_memory_bytes, or say max_model_len to be sure of a length.",
                engine_config.max_tokens_per_request,
                engine_config.max_model_len,
            )

    @property
    def exactness(self) -> str:
        """The tier of the repeatability promise on these kernels: see docs/lossless.md."""
        return "identical" if self.model.dtype == torch.float64 else "near-tie"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results come in the order of the prompts.

        A prompt is text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``. ``sampling_params`` is one
        for all or one per prompt. ``on_step(engine, outputs)`` is called after every step; it may abort requests.

        Raises ``InvalidValueError`` or ``ContextLengthError`` before anything is computed if any prompt is unusable.
        """
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        return self._run(encoded, sampling_params, on_step)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages with ``role`` and ``content``) or several (a list of lists)."""
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
            raise InvalidValueError("messages", messages, "must be a list of messages with 'role' and 'content'")
        messages = list(messages)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        tokenizer, template = self._text_tools(), self.checkpoint.chat_template
        talks = messages if several else [messages]
        return self._run([(None, encode_chat(tokenizer, template, talk)) for talk in talks], sampling_params, on_step)

    def _run(
        self,
        encoded: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_step: OnStep | None,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(encoded))
        sequences: list[EngineSequence] = []
        try:
            for (_, token_ids), p in zip(encoded, params, strict=True):
                sequences.append(self.engine.sequence(self.engine.add(token_ids, p)))
            while any(seq.status is not Status.FINISHED for seq in sequences):
                outputs = self.engine.step()
                if on_step:
                    on_step(self.engine, outputs)
        finally:  # an error or Ctrl-C: nothing of this call stays behind
            for seq in sequences:
                if seq.status is not Status.FINISHED:
                    self.engine.abort(seq.id)
        return [self._result(text, seq) for (text, _), seq in zip(encoded, sequences, strict=True)]

    def _result(self, prompt: str | None, seq: EngineSequence) -> RequestOutput:
        output_ids = seq.output_ids
        text = self.tokenizer.decode(output_ids) if self.tokenizer else ""
        stats = RequestStats(
            prompt_tokens=seq.num_prompt,
            output_tokens=len(output_ids),
            prefill_s=seq.stats.prefill_s,
            decode_s=seq.stats.decode_s,
            preemptions=seq.stats.preemptions,
        )
        completion = CompletionOutput(0, text, output_ids, str(seq.finish_reason), seq.error)
        return RequestOutput(prompt, seq.ids[: seq.num_prompt], [completion], stats, self.exactness)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it is text, and its ids."""
        only_ids = False
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                raise InvalidValueError("prompt", prompt, "as a mapping must hold 'prompt' or 'prompt_token_ids' alone")
            only_ids = "prompt_token_ids" in prompt
            (prompt,) = prompt.values()
        if isinstance(prompt, str) and not only_ids:
            ids = self._text_tools().encode(prompt)
            if not ids:
                raise InvalidValueError("prompt", prompt, "must not be empty: this model has no token to start from")
            return prompt, ids
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Sequence):
            raise InvalidValueError("prompt", prompt, "must be text or a sequence of token ids")
        return None, [int(i) if isinstance(i, Integral) and not isinstance(i, bool) else i for i in ids]

    def _text_tools(self) -> Tokenizer:
        if self.tokenizer is None:
            fix = "Pass tokenizer=FOLDER, or give prompts as token ids."
            raise InvalidValueError(
                "tokenizer", None, f"is needed for text: {self.checkpoint.path} has no tokenizer", fix
            )
        return self.tokenizer


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several → several. A list of integers is one prompt, as is an array with one dimension."""
    if isinstance(prompts, (str, Mapping)) or getattr(prompts, "ndim", None) == 1:
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidValueError("prompts", prompts, "must be text, token ids, or a list of these")
    prompts = list(prompts)
    return [prompts] if prompts and all(isinstance(p, Integral) for p in prompts) else prompts


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    several = list(params) if isinstance(params, Iterable) else [params]
    if len(several) != n or not all(isinstance(p, SamplingParams) for p in several):
        limit = f"must be one SamplingParams, or one for each of {n} prompts"
        raise InvalidValueError("sampling_params", params, limit)
    return several
