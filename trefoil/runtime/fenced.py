"""Fenced writes: the two Lua scripts that every leased role writes through, and their operations. Redis <= 6.2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trefoil.runtime import codec

DONE: Final = 1
REFUSED: Final = 0
UNREADABLE: Final = 2
LEASE_MAX_S: Final = 60.0
"""Longest lease: what stands at a lease's key for longer, or forever, is none."""
EPOCH_BYTES_MAX: Final = 64
"""Bytes of an epoch's key that are read, and one more: what is longer is not an epoch."""

# Both scripts: the text at a key; false where there is none, or something of another type.
_TEXT: Final = """
local function text(key)
  if redis.call('TYPE', key).ok ~= 'string' then return false end
  return redis.call('GET', key)
end
"""

# The one write script. KEYS: epoch:<role>, writes:<role>, then one key per operation.
# ARGV: epoch, now_ms, channel, writes_max, then per operation: kind, number of arguments, arguments.
# Nothing is written unless the writer's epoch is the one stored: an older writer has been overtaken, and a newer one
# means that Redis lost its data, so that the holder must take the role again before anyone can take it below him.
# Nothing is written either where a stream or hash is to be written to and something else is there: that is deleted, and
# the writer hears of it, because what the key held before is lost and he may have to write more than this.
WRITE_SCRIPT: Final = (
    _TEXT
    + """
local epoch = text(KEYS[1])
if epoch ~= ARGV[1] then return {0, epoch or ''} end
local types = {append = 'stream', fields = 'hash', replace = 'hash'}
local spoilt = {2}
local a = 5
for k = 3, #KEYS do
  local wanted = types[ARGV[a]]
  local found = wanted and redis.call('TYPE', KEYS[k]).ok
  if found and found ~= 'none' and found ~= wanted then spoilt[#spoilt + 1] = KEYS[k] end
  a = a + 2 + tonumber(ARGV[a + 1])
end
local function append(key, ...)
  local id = redis.pcall('XADD', key, ...)
  if type(id) == 'table' and id.err and (string.find(id.err, 'WRONGTYPE') or string.find(id.err, ' ID')) then
    spoilt[#spoilt + 1] = key
    return ''
  end
  return id
end
local results = {1}
a = 5
for k = 3, #KEYS do
  if #spoilt > 1 then break end
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
    result = append(KEYS[k], 'MAXLEN', arg[2], '*', 'd', arg[1])
    if type(result) == 'table' then return result end
    if arg[3] ~= '0' then redis.call('PEXPIRE', KEYS[k], arg[3]) end
  elseif kind == 'delete' then
    redis.call('DEL', KEYS[k])
    redis.call('PUBLISH', ARGV[3], KEYS[k])
  elseif kind == 'fields' or kind == 'replace' then
    if kind == 'replace' then redis.call('DEL', KEYS[k]) end
    for i = 2, count, 2 do redis.call('HSET', KEYS[k], arg[i], arg[i + 1]) end
    if arg[1] ~= '0' then redis.call('PEXPIRE', KEYS[k], arg[1]) end
  else
    return redis.error_reply('unknown kind ' .. kind)
  end
  results[#results + 1] = result
  local found = redis.call('TYPE', KEYS[2]).ok
  if found ~= 'none' and found ~= 'stream' then redis.call('DEL', KEYS[2]) end
  local note = redis.pcall(
    'XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'epoch', ARGV[1], 'key', KEYS[k], 'at_ms', ARGV[2])
  if type(note) == 'table' then redis.call('DEL', KEYS[2]) end
end
if #spoilt > 1 then
  for i = 2, #spoilt do
    redis.call('DEL', spoilt[i])
    redis.call('PUBLISH', ARGV[3], spoilt[i])
  end
  return spoilt
end
return results
"""
)

# KEYS: epoch:<role>, lease:<role>. ARGV: verb, epoch, lease bytes, ttl_ms, the epoch that was read, the caller's last
# lease, the caller's name, which a lease holds as field 2 of its message. Acquiring compares with the epoch that the
# caller has read, because the lease, which holds the new epoch, is encoded by the caller. The caller need not wait for
# a separate lease, which it lost by its epoch. A Redis that lost its last second may hand an epoch out twice: a
# holder that finds another's name in the lease has lost the role, although the epoch is the holder's.
LEASE_SCRIPT: Final = (
    _TEXT
    + f"""
local stored = text(KEYS[1])
if ARGV[1] == 'acquire' then
  local lease, left = text(KEYS[2]), redis.call('PTTL', KEYS[2])
  if lease and left >= 0 and left <= {round(LEASE_MAX_S * 1000)} and lease ~= ARGV[6] then return 0 end
  if string.sub(stored or '', 1, {EPOCH_BYTES_MAX + 1}) ~= ARGV[5] then return -1 end
  redis.call('SET', KEYS[1], ARGV[2])
  redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
  return 1
end
if stored ~= ARGV[2] then return 0 end
local lease, left = text(KEYS[2]), redis.call('PTTL', KEYS[2])
local holder = #ARGV[7] < 128 and string.char(18, #ARGV[7]) .. ARGV[7] or ARGV[7]
if lease and left >= 0 and left <= {round(LEASE_MAX_S * 1000)} and not string.find(lease, holder, 1, true) then
  return 0
end
if ARGV[1] == 'renew' then redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
else redis.call('DEL', KEYS[2]) end
return 1
"""
)


@dataclass(frozen=True, slots=True)
class Put:
    """Operation SET; `ttl_s` None = never expires."""

    key: str
    obj: Any
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Append:
    """Operation XADD to a stream of at most `maxlen` entries. `obj`: the value, or what `codec.encode` made of it."""

    key: str
    obj: Any
    maxlen: int
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Operation DEL of a key."""

    key: str


@dataclass(frozen=True, slots=True)
class PutBytes:
    """Operation SET of a value that is encoded already; never expires."""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class SetFields:
    """Operation HSET of several fields of a hash: whole values, so that doing it twice does nothing twice. With
    `replace` no other field stays."""

    key: str
    fields: Mapping[str, float | str]
    ttl_s: float | None = None
    replace: bool = False


Write = Put | PutBytes | Append | Delete | SetFields


def type_of(write: Append | SetFields) -> str:
    """Type of the value at the key that is appended to or has fields set, in Redis' words."""
    return "stream" if isinstance(write, Append) else "hash"


def encoded(write: Write) -> Write:
    """Encode the value of a Put that never expires; every other operation as it is."""
    return PutBytes(write.key, codec.encode(write.obj)) if isinstance(write, Put) and write.ttl_s is None else write


def arguments(write: Write) -> tuple[str, Sequence[Any]]:
    """Kind and arguments of one operation, as WRITE_SCRIPT reads them."""
    match write:
        case Put(_, obj, ttl_s):
            return "set", [codec.encode(obj), milliseconds(ttl_s)]
        case PutBytes(_, data):
            return "set", [data, 0]
        case Append(_, obj, maxlen, ttl_s):
            return "append", [obj if isinstance(obj, bytes) else codec.encode(obj), maxlen, milliseconds(ttl_s)]
        case Delete():
            return "delete", []
        case SetFields(_, fields, ttl_s, replace):
            pairs = [part for name, value in fields.items() for part in (name, str(value))]
            return "replace" if replace else "fields", [milliseconds(ttl_s), *pairs]


def milliseconds(seconds: float | None) -> int:
    """Milliseconds of a duration or time for Redis; None = 0 = never."""
    return 0 if seconds is None else max(1, round(seconds * 1000))
