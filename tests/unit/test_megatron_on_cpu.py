"""Where "cuda" means host memory, and where it does not."""

import threading

import torch

from pipeline.embedded.megatron_on_cpu import cuda_means_cpu


def test_tensors_asked_for_on_cuda_are_in_host_memory() -> None:
    with cuda_means_cpu():
        made = [
            torch.zeros(2, device="cuda"),
            torch.empty(2, device=torch.device("cuda", 0)),
            torch.ones(2).to("cuda"),
            torch.ones(2).to("cuda:0", torch.bfloat16),
            torch.ones(2).to(device="cuda"),
            torch.ones(2).cuda(),
        ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[3].dtype == torch.bfloat16


def test_a_type_is_named_as_on_cuda_and_conversions_still_work() -> None:
    with cuda_means_cpu():
        assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert torch.ones(1).type(torch.float16).dtype == torch.float16
        with cuda_means_cpu():
            assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_other_threads_are_not_touched() -> None:
    seen: list[str] = []
    with cuda_means_cpu():
        thread = threading.Thread(target=lambda: seen.append(torch.ones(1).type()))
        thread.start()
        thread.join()
    assert seen == ["torch.FloatTensor"]


def test_an_error_inside_ends_it() -> None:
    try:
        with cuda_means_cpu():
            raise KeyError
    except KeyError:
        pass
    assert torch.ones(1).type() == "torch.FloatTensor"
