"""Stand-in for SGLang: a rollout server that samples from the Hugging Face model on the CPU.

Every sample has a seed of its own, made from (run seed, policy version, prompt, k-th sample of that prompt), so a run
does not depend on the order in which requests arrive. Prompts within one batch must be distinct for that to hold.
"""

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verl.workers.rollout.replica import TokenOutput

from pipeline.callbacks.failure import recording_failure

_GATHER_SECONDS = 0.02  # wait this long for requests that belong together


@dataclass
class _Request:
    prompt: list[int]
    max_tokens: int
    temperature: float
    wants_log_probs: bool
    seed: int
    answer: "asyncio.Future[TokenOutput]"


class RolloutServer:
    """The server actor: holds the policy's weights, collects requests into batches, samples."""

    def __init__(self, config: Any, model_path: str) -> None:
        torch.set_num_threads(1)
        self._config = config
        self._hf_config = AutoConfig.from_pretrained(model_path)
        self._model = AutoModelForCausalLM.from_config(self._hf_config, dtype=torch.bfloat16).eval()
        self._version: int | None = None
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._samples_of: dict[bytes, int] = {}

    async def launch(self) -> tuple[str, int]:
        """Start serving; returns (node address, 0): requests come through Ray, not through a port."""
        self._serving = asyncio.get_running_loop().create_task(self._serve())
        return ray.util.get_node_ip_address(), 0

    async def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Load the policy's weights. Raises RuntimeError when names do not match the model's."""
        with recording_failure("rollout server"):
            missing, unexpected = self._model.load_state_dict(weights, strict=False)
            if self._hf_config.tie_word_embeddings:
                missing = [name for name in missing if name != "lm_head.weight"]
            if missing or unexpected:
                raise RuntimeError(f"weights do not fit the model: missing {missing}, unexpected {unexpected}")

    async def set_version(self, version: int | None) -> None:
        """Number the policy (verl's global step): samples of a new version are drawn afresh."""
        self._samples_of.clear()
        self._version = version

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:
        """Sample one response to `prompt_ids` (token ids); the answer carries log-probabilities when asked for."""
        prompt = list(prompt_ids)
        key = hashlib.sha256(repr((self._config.seed, self._version, prompt)).encode()).digest()
        sample = self._samples_of.get(key, 0)
        self._samples_of[key] = sample + 1
        seed = int.from_bytes(hashlib.sha256(key + sample.to_bytes(4, "little")).digest()[:7], "little")
        room = self._config.prompt_length + self._config.response_length - len(prompt)
        request = _Request(
            prompt=prompt,
            max_tokens=sampling_params.get("max_tokens") or min(self._config.response_length, room),
            temperature=float(sampling_params.get("temperature", 1.0)),
            wants_log_probs=sampling_params.get("logprobs") not in (None, False),
            seed=seed,
            answer=asyncio.get_running_loop().create_future(),
        )
        await self._queue.put(request)
        return await request.answer

    async def _serve(self) -> None:
        while True:
            batch = [await self._queue.get()]
            await asyncio.sleep(_GATHER_SECONDS)
            while not self._queue.empty() and len(batch) < self._config.max_num_seqs:
                batch.append(self._queue.get_nowait())
            batch.sort(key=lambda request: (request.prompt, request.seed))
            try:
                with recording_failure("rollout server"):
                    answers = await asyncio.to_thread(self._sample, batch)
            except Exception as error:  # noqa: BLE001  the requests must fail with it, not hang
                for request in batch:
                    request.answer.set_exception(error)
            else:
                for request, answer in zip(batch, answers, strict=True):
                    request.answer.set_result(answer)

    @torch.no_grad()
    def _sample(self, batch: list[_Request]) -> list[TokenOutput]:
        size = len(batch)
        longest = max(len(request.prompt) for request in batch)
        tokens = torch.full((size, longest), self._hf_config.pad_token_id)
        attention = torch.zeros(size, longest, dtype=torch.long)
        for row, request in enumerate(batch):
            tokens[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            attention[row, longest - len(request.prompt) :] = 1
        generators = [torch.Generator().manual_seed(request.seed) for request in batch]
        temperature = torch.tensor([request.temperature for request in batch])
        greedy = temperature <= 0
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        responses: list[list[int]] = [[] for _ in batch]
        log_probs: list[list[float]] = [[] for _ in batch]
        stopped = [False] * size
        cache = None
        while not all(self._done(*state) for state in zip(batch, responses, stopped, strict=True)):
            output = self._model(
                input_ids=tokens,
                attention_mask=attention,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            cache = output.past_key_values
            logits = output.logits[:, -1].float()
            scaled = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
            uniform = torch.stack([torch.rand(scaled.shape[1], generator=generator) for generator in generators])
            gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
            chosen = torch.where(greedy[:, None], scaled, scaled + gumbel).argmax(-1)
            for row, request in enumerate(batch):
                if self._done(request, responses[row], stopped[row]):
                    continue
                token = int(chosen[row])
                responses[row].append(token)
                log_probs[row].append(float(scaled[row, token]))
                stopped[row] = token == self._hf_config.eos_token_id
            attention = torch.cat([attention, torch.ones(size, 1, dtype=torch.long)], dim=1)
            tokens, positions = chosen[:, None], positions[:, -1:] + 1
        return [
            TokenOutput(
                token_ids=responses[row],
                log_probs=log_probs[row] if request.wants_log_probs else None,
                stop_reason="stop" if stopped[row] else "length",
                extra_fields={"global_steps": self._version},
            )
            for row, request in enumerate(batch)
        ]

    @staticmethod
    def _done(request: _Request, response: list[int], stopped: bool) -> bool:
        return stopped or len(response) >= request.max_tokens

    # What verl's manager calls on any server, and this one has no use for: one memory, no cache kept between batches.
    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def resume_generation(self) -> None: ...

    async def start_profile(self, **_: Any) -> None: ...

    async def stop_profile(self) -> None: ...
