"""Is the system serving? Asked the way a client asks: with a real inference through the inference port."""

from typing import Any, Final

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from trefoil.cli.launcher import Launcher
from trefoil.core.errors import StartError, Unavailable
from trefoil.runtime.clock import Clock

POLL_S: Final = 0.1
CALL_TIMEOUT_S: Final = 5.0
DEADLINE_S: Final = 60.0


async def first_answer(launcher: Launcher, clock: Clock, deadline_s: float = DEADLINE_S) -> float:
    """Wait until the family answers; returns the seconds since the launch began.

    Raises:
        StartError: a service failed, or nothing answered in time; says what the dispatcher said last.
    """
    launch = launcher.launch
    assert launch is not None, "the launcher has started"
    give_up_s = clock.monotonic_s() + deadline_s
    said = "nothing"
    while clock.monotonic_s() < give_up_s:
        if launcher.failed:
            raise StartError(launcher.failed)
        try:
            await infer_zeros(launch.addresses["inference"], launch.family)
        except Unavailable as error:
            said = str(error)
            await clock.sleep(POLL_S)
        else:
            return clock.now_s() - launch.started_at_s
    raise StartError(
        f"no answer within {deadline_s:.0f} s; the dispatcher said: {said}",
        field="inference",
        value=launch.addresses["inference"],
        remedy=f"read the logs in {launch.state_dir}/logs",
    )


async def infer_zeros(address: str, family: str) -> dict[str, Any]:
    """One inference on an input of zeros, shaped as the family's own metadata says.

    Raises:
        Unavailable: no answer, with what was said instead.
    """
    async with triton.InferenceServerClient(address) as client:
        try:
            if not await client.is_model_ready(family, client_timeout=CALL_TIMEOUT_S):
                raise Unavailable(f"no slice serves {family} yet")
            metadata = await client.get_model_metadata(family, client_timeout=CALL_TIMEOUT_S)
            inputs = []
            for tensor in metadata.inputs:
                shape = [max(1, size) for size in tensor.shape]
                zeros = triton.InferInput(tensor.name, shape, tensor.datatype)
                zeros.set_data_from_numpy(np.zeros(shape, triton_to_np_dtype(tensor.datatype)))
                inputs.append(zeros)
            answer = await client.infer(family, inputs, client_timeout=CALL_TIMEOUT_S)
            return {output.name: answer.as_numpy(output.name) for output in metadata.outputs}
        except InferenceServerException as error:
            raise Unavailable(f"{error.status()}: {error.message()}") from error


async def server_version(target: str) -> str:
    """Version of a Triton, asked of itself; `unknown` when it does not answer."""
    async with triton.InferenceServerClient(target) as client:
        try:
            metadata = await client.get_server_metadata(client_timeout=CALL_TIMEOUT_S)
        except InferenceServerException:
            return "unknown"
        return str(metadata.version)
