"""One pass over tensors on a GPU finds what is not finite."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from dapo_rl.models.finite import not_finite

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 4097, -1])
def test_one_number_among_many_is_found(bad, dtype, place):
    values = {f"w{i}": torch.full((1000, 999), 1e38, device="cuda").to(dtype) for i in range(5)}
    values |= {"small": torch.ones(3, device="cuda"), "here": torch.ones(3), "count": torch.arange(3, device="cuda")}
    assert not_finite(values) is None
    values["w4"].view(-1)[place] = bad
    assert not_finite(values) == "w4"
