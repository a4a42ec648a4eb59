"""JSON that clients send. Expected: what Triton makes of it, or None where it refuses."""

import math

from tests.public_reports.report import Report

KIND = "JSON body"
MARK = b"\xef\xbb\xbf"


def value(source: str, text: bytes, expected: object) -> Report:
    return Report(KIND, source, b'{"a":' + text + b"}", None if expected is None else {"a": expected})


READ = (
    Report(KIND, "byte order mark", MARK + b"{}", {}),
    Report(KIND, "first byte of a byte order mark", MARK[:1] + b"{}", {}),
    Report(KIND, "NUL and a rest, of a C string", b"{}\0 and more", {}),
    Report(KIND, "equal keys", b'{"a":1,"a":2}', {"a": 1}),
    value("infinite numbers", b"[Inf,-Inf,Infinity,-Infinity]", [math.inf, -math.inf, math.inf, -math.inf]),
    value("their names in a string", b'"Inf, -NaN and \\" Inf"', 'Inf, -NaN and " Inf'),
    value("largest double", b"1e308", 1e308),
    value("less than any double", b"1e-400", 0.0),
    value("whole number beyond 64 bits", b"1" + b"0" * 30, 10**30),
)
NO_NUMBER = (value("NaN", b"NaN", math.nan), value("negative NaN", b"-NaN", math.nan))
REFUSED = (
    Report(KIND, "two byte order marks", MARK + MARK + b"{}", None),
    Report(KIND, "byte order mark after a space", b" " + MARK + b"{}", None),
    Report(KIND, "byte order mark alone", MARK, None),
    Report(KIND, "more after its end", b"{}x", None),
    Report(KIND, "null", b"null", None),
    value("nan in small letters", b"nan", None),
    value("INF in capital letters", b"INF", None),
    value("plus sign", b"+Inf", None),
    value("two signs", b"--NaN", None),
    value("half a name", b"Infinit", None),
    value("name and digit", b"NaN1", None),
    value("beyond a double", b"1e400", None),
    value("below minus a double", b"-1e400", None),
    value("whole number beyond a double", b"1" + b"0" * 310, None),
    value("310 digits and a point", b"1" + b"0" * 310 + b".0", None),
    value("string without an end", b'"Inf', None),
    value("leading zero", b"01", None),
)
