"""A dispatcher with OpenAI's API, before real Tritons: the stand-in for vLLM, and one with the speller and the echo."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tests.support import engine_family
from tests.support.dispatching import dispatching, until
from tests.support.special_models import SpecialTriton, special_plan
from tests.support.special_world import World
from tests.support.triton_process import TritonProcess
from tests.unit.dispatcher.worlds import key, node
from trefoil.core.common import Revision
from trefoil.core.fleet import SliceState, SliceStatus
from trefoil.core.plan import Route, RouteTarget

CHAT = engine_family.FAMILY
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
SLICE = key(9)


def spelt(*pieces: bytes, **more) -> str:
    """Prompt that makes the speller say these pieces."""
    return json.dumps({"pieces": [piece.hex() for piece in pieces], **more})


@contextmanager
def both_tritons(folder) -> Iterator[tuple[TritonProcess, SpecialTriton]]:
    """The stand-in for vLLM, and a Triton with the speller."""
    (engine_family.write_family(folder / "models") / "chat_template.jinja").write_text(TEMPLATE)
    hosted = engine_family.hosted(1)
    installed = engine_family.installation(folder)
    engine = TritonProcess(folder, 1, source=folder / "models", serving=hosted, triton=installed)
    speller = SpecialTriton(folder, 0, 1, ("speller", "scores", "echo", "embedder"))
    try:
        asyncio.run(_ready(engine, speller))
        yield engine, speller
    finally:
        engine.close()
        speller.close()


async def _ready(engine, speller):
    await asyncio.gather(engine.ready([engine_family.hosted(1)], 60.0), speller.ready())


@asynccontextmanager
async def serving_both(state, folder, tritons, **settings) -> AsyncIterator[World]:
    engine, speller = tritons
    hosted = engine_family.hosted(1)
    status = SliceStatus(
        key=SLICE, generation=1, mig_uuid="MIG-9", state=SliceState.READY, hosted=(hosted,),
        grpc_target=engine.launch.grpc_target, since_s=1.0, revision=Revision(1, 1, 0), credits=8,
    )  # fmt: skip
    target = RouteTarget(SLICE, hosted.variant, 0, 1.0, 8, False, "", 0.6, 1)
    chosen = {"rest_address": "127.0.0.1:0", "window_s": 3600.0, **settings}
    async with dispatching(state, folder, **chosen) as running:
        made = World(running, state, [speller])
        routes = [*special_plan([speller]).routes, Route(CHAT, "weighted", "fifo", (target,), 5000, 0, {})]
        await made.publish(node([speller.status(), status]), routes)
        await until(
            lambda: all(running.contracts.known(name) for name in ("speller", "scores", "echo", "embedder", CHAT))
        )
        yield made


def base(world: World) -> str:
    return f"http://{world.running.rest_address}/v1"
