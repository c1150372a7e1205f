"""A model whose parameters are sharded over ranks by FSDP2.

A parameter is whole only while the module that it was sharded with runs. Log-probabilities and values need more of a
model than its own `forward` gives: the hidden states and the weight of the output layer. So the whole computation runs
inside the `forward` of one module around the model, which is the root of the sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from dapo_rl.models.recompute import layers_of
from dapo_rl.models.response_logps import ResponseLogps, ResponsePass, TokenStats
from dapo_rl.models.values import ResponseValues, TokenValues

if TYPE_CHECKING:
    from dapo_rl.models.kernels.fuse_training import TrainingFusion

Stats = TypeVar("Stats", TokenStats, TokenValues)


class RanksOutOfMemoryError(torch.OutOfMemoryError):
    """A forward pass did not fit into the memory of a rank. Every rank raises it, and can compute again."""

    def __init__(self, here: bool) -> None:
        """`here` if it was this rank."""
        super().__init__("a forward pass does not fit into memory")
        self.here = here


class ShardedPass(ResponsePass[Stats]):
    """Shards a model, and runs it. Every rank has to compute at the same time."""

    def __init__(
        self,
        model: Any,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        offload: bool = False,
        anyone: Callable[[bool], bool],
        **how: Any,
    ) -> None:
        """`anyone` tells every rank whether it is true on one of them."""
        # Whether samples can be packed is tried out on the whole model.
        super().__init__(model, dtype=dtype, **how)
        self._computes_on = device
        self._root = _shard(model, mesh, dtype, offload)
        self._anyone = anyone
        self._sharded: list[Any] = [module for module in self._root.modules() if isinstance(module, FSDPModule)]
        self._begun: set[Any] = set()
        """The modules whose parameters have been gathered in this forward pass."""
        for module in self._sharded:  # after FSDP's own hook, which gathers
            module.register_forward_pre_hook(lambda module, arguments: self._begun.add(module))

    @property
    def device(self) -> torch.device:
        return self._computes_on  # offloaded parameters are on the host

    def _run(self, forward: Callable[[], Stats]) -> Stats:
        stats = self._try(forward)
        if self._anyone(stats is None):
            failed = stats is None
            stats = None
            if not hasattr(self._root, "reset_iter_state"):  # before torch 2.13 there is no way to go on
                raise torch.OutOfMemoryError("a forward pass does not fit into memory")
            self._root.reset_iter_state()
            raise RanksOutOfMemoryError(failed)
        assert stats is not None
        if not torch.is_grad_enabled():
            self._root.reshard()  # the root keeps its parameters for a backward pass, and there is none
        return stats

    def _find_fusion(self) -> TrainingFusion:
        """Tries what can be fused, in a forward pass of its own: it gathers the parameters of a layer at a time."""
        from dapo_rl.models.kernels.fuse_training import TrainingFusion

        layers = _LayersInTurn(self._sharded)

        def find() -> TrainingFusion:
            try:
                return TrainingFusion(self._model, self.device, self._dtype, layers.gather)
            finally:
                layers.end()

        with torch.no_grad():
            fusion: TrainingFusion = self._root(find)
        self._root.reshard()
        return fusion

    def _try(self, forward: Callable[[], Stats]) -> Stats | None:
        """None if this rank runs out of memory. It still takes part in the collectives of the others."""
        self._begun.clear()
        try:
            stats: Stats = self._root(forward)
            return stats
        except torch.OutOfMemoryError:
            pass
        # Outside the except block, because the exception's traceback keeps the activations alive.
        for module in self._sharded:
            if module not in self._begun:
                module.unshard()
                module.reshard()
        return None


class ShardedLogps(ShardedPass[TokenStats], ResponseLogps):
    """Log-probabilities under a sharded policy."""


class ShardedValues(ShardedPass[TokenValues], ResponseValues):
    """The values of a sharded critic."""


class _LayersInTurn:
    """Makes the parameters of sharded modules whole, of one at a time, while the root computes."""

    def __init__(self, sharded: Sequence[Any]) -> None:
        _root, *layers = sharded
        self._owners = {module: layer for layer in layers for module in layer.modules()}
        self._whole: Any = None

    def gather(self, module: nn.Module) -> None:
        owner = self._owners.get(module)
        if owner is not self._whole:
            self.end()
            if owner is not None:
                owner.unshard()
            self._whole = owner

    def end(self) -> None:
        if self._whole is not None:
            self._whole.reshard()
        self._whole = None


class _Root(nn.Module):
    """Runs a function while the parameters of the model that belong to no layer are whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        result = compute()
        if not isinstance(result, tuple):
            return result
        first, *others = result
        return type(result)(first.clone(), *others)  # FSDP's hooks are on the output, which must not be a view


def _shard(model: Any, mesh: DeviceMesh, dtype: torch.dtype, offload: bool) -> Any:
    """Shards each decoder layer, and the rest as one. Gradients are summed over ranks in float32."""
    how: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy()}
    if dtype != torch.float32:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, **how)
    root: Any = fully_shard(_Root(model), **how)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by counts over all ranks, so that their gradients add up.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root
