"""Fenced writes: the two Lua scripts that every leased role writes through, and their operations. Redis <= 6.2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trefoil.runtime import codec

# The one write script. KEYS: epoch:<role>, writes:<role>, then one key per operation.
# ARGV: epoch, now_ms, channel, writes_max, then per operation: kind, number of arguments, arguments.
# Nothing is written unless the writer's epoch is the one stored: an older writer has been overtaken, and a newer one
# means that Redis lost its data, so that the holder must take the role again before anyone can take it below him.
WRITE_SCRIPT: Final = """
local epoch = redis.call('GET', KEYS[1])
if epoch ~= ARGV[1] then return {0, epoch or ''} end
local results = {1}
local a = 5
for k = 3, #KEYS do
  local kind, count = ARGV[a], tonumber(ARGV[a + 1])
  local arg = {}
  for i = 1, count do arg[i] = ARGV[a + 1 + i] end
  a = a + 2 + count
  local result = ''
  if kind == 'set' then
    if arg[2] == '0' then redis.call('SET', KEYS[k], arg[1])
    else redis.call('SET', KEYS[k], arg[1], 'PX', arg[2]) end
    redis.call('PUBLISH', ARGV[3], KEYS[k])
  elseif kind == 'append' then
    result = redis.call('XADD', KEYS[k], 'MAXLEN', arg[2], '*', 'd', arg[1])
    if arg[3] ~= '0' then redis.call('PEXPIRE', KEYS[k], arg[3]) end
  elseif kind == 'delete' then
    redis.call('DEL', KEYS[k])
    redis.call('PUBLISH', ARGV[3], KEYS[k])
  elseif kind == 'increment' then
    for i = 2, count, 2 do redis.call('HINCRBYFLOAT', KEYS[k], arg[i], arg[i + 1]) end
    if arg[1] ~= '0' then redis.call('PEXPIRE', KEYS[k], arg[1]) end
  else
    return redis.error_reply('unknown kind ' .. kind)
  end
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'epoch', ARGV[1], 'key', KEYS[k], 'at_ms', ARGV[2])
  results[#results + 1] = result
end
return results
"""

# KEYS: epoch:<role>, lease:<role>. ARGV: verb, epoch, lease bytes, ttl_ms. Acquiring compares with the epoch that the
# caller has read (ARGV[5]), because the lease, which holds the new epoch, is encoded by the caller.
LEASE_SCRIPT: Final = """
local stored = redis.call('GET', KEYS[1])
if ARGV[1] == 'acquire' then
  if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
  if (stored or '') ~= ARGV[5] then return -1 end
  redis.call('SET', KEYS[1], ARGV[2])
  redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
  return 1
end
if stored ~= ARGV[2] then return 0 end
if ARGV[1] == 'renew' then redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
else redis.call('DEL', KEYS[2]) end
return 1
"""


@dataclass(frozen=True, slots=True)
class Put:
    """Operation SET; `ttl_s` None = never expires."""

    key: str
    obj: Any
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Append:
    """Operation XADD to a stream of at most `maxlen` entries."""

    key: str
    obj: Any
    maxlen: int
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Operation DEL of a key."""

    key: str


@dataclass(frozen=True, slots=True)
class Increment:
    """Operation HINCRBYFLOAT of several fields of a hash."""

    key: str
    deltas: Mapping[str, float]
    ttl_s: float | None = None


Write = Put | Append | Delete | Increment


def arguments(write: Write) -> tuple[str, Sequence[Any]]:
    """Kind and arguments of one operation, as WRITE_SCRIPT reads them."""
    match write:
        case Put(_, obj, ttl_s):
            return "set", [codec.encode(obj), milliseconds(ttl_s)]
        case Append(_, obj, maxlen, ttl_s):
            return "append", [codec.encode(obj), maxlen, milliseconds(ttl_s)]
        case Delete():
            return "delete", []
        case Increment(_, deltas, ttl_s):
            pairs = [part for name, delta in deltas.items() for part in (name, repr(float(delta)))]
            return "increment", [milliseconds(ttl_s), *pairs]


def milliseconds(seconds: float | None) -> int:
    """Milliseconds of a duration or time for Redis; None = 0 = never."""
    return 0 if seconds is None else max(1, round(seconds * 1000))
