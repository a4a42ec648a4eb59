"""A Triton repository as somebody else keeps it: small real ONNX models, each with a config.pbtxt of its own.

The graphs were written with the package onnx (opset 17, random weights) and are kept here compressed:
linear       x FP32[N,4] -> y FP32[N,3]          Gemm, Softmax
mlp          x FP32[N,4] -> y FP32[N,3]          Gemm, Relu, Gemm, Softmax
mlp_unnamed  input.1 FP32[N,4] -> 7 FP32[N,3]    the same, exported without names
minus        a, b FP32[N,4] -> d FP32[N,4]       a - b
"""

import base64
import zlib
from pathlib import Path

GRAPHS = {
    "linear": (
        "c-rIO6k@R2%E%?e#aO|`SkA?mB*a*(#NwWso69A`#aJxFSgFJwoS#;bn^>X6&Bc;fky$LkxPXyKh%sHunuCRdS%A@rvE0ibd"
        "mfVm%LL^Eyn@&4A|nO&FFW{rU*pl3eI@RU2iDc+?wef~yPs`Mh{J4?bUU`5E&H@YAzG8XcwVqf*eAxSy<dmFeSee)&>=$nT)"
        "Z5NLY!R8LX3V~OdKppK+#HcQD!F=E(QTX0G&`R+y"
    ),
    "mlp": (
        "c-pgi&cr3c#aO|`RBp({lw>Hxn4!eto|>D>#lyvzA;egu#1fR6Qwma31XN=LRAVH>SPWGo!^K!E#8|1s9-N<6lABne#m&W%Sdm#Q!MK2t"
        "Nh`()Xeb8@2de<1SAd}SiG4i>zuBd^m+V`sUuyquhR?qLyN}tF-aTs1*~4wWCX8{vik0=g+wolX-#2`>U(4OKuPD88-v#dmd#?9M`=eu~"
        "?h}5OXn$#<h`mhiZd)xmC!lk|W{Z65*0!I+V0u7*SChT_>eBsTQ?KsV@&MXy#KFqJ3{+v`)75MDGR)Y%f5+o}tB-f?-_Lx_W&&@--X*U#"
        "+bf3I+s`R?v-|JaXTPW<Xx~Bh-2FFNMD1-AMeSw&MDNoQ1KMN+Hit(w&0~Mi@+`aWv*iy&fx=CQpNp4+QHYa^S%}e(i;06J2`E~LE()a5"
        "IXHzFoLIOR1Ox$&FL8D"
    ),
    "mlp_unnamed": (
        "c-rIO6k@RY%)}+d#h#g0P+FpA$i-9+#7Txij2TKS?y0%CTs&Ni8A6OjN-ROCIi*}8T#Q9PHAX-+Mna6mP&G1KjKxBX=1T0r`"
        "DrD&i4|JhTr7zdnZ*)}3mBP%7}K?4I9NDX1sI)xrh5elil5lmbMTv8ntRE<wfd#@?`HVy`@j2`P3hgE_MAQ3_G`iz_p4Z0@4"
        "Fq(W&eG{cl)*6UHgjCEB9USZm{QipR_+ZX6ioScZv3wCW_e0<nFfBl7pC?WauUGty|lE4uk0d{asD=?yF1phfTe@U(17om4g"
        "{<yOEcTPgk$q%P?d6{vD6^tv=qle?Rjzn+d!TdzZZ0Y_Aw*Z$GEp&F;TvpZ%hepnV6~bNAn95w*8f6t$Q66TMGM3}Q}_kr$6"
        "@n#ca2<ym&$XUiXmLIj`?KNl|tqYx(-vk;>n7ZV3d5-`Zj(M6e^ShyGj1OYLmbwm"
    ),
    "minus": ("c-rIO6k@On<>KRFOypur5@JkIVh%0^(&<qmKp`Q1E?y2sAx<u4Ax1wgCJq*mXcC5K5>PY+L)3|di$OpT03VPEl>"),
}
LINEAR = """
platform: "onnxruntime_onnx" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
UNNAMED = LINEAR.replace('"x"', '"input.1"').replace('"y"', '"7"')
MINUS = """
backend: "onnxruntime" max_batch_size: 8
input [ { name: "a" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "b" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "d" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


def graph(name: str) -> bytes:
    return zlib.decompress(base64.b85decode(GRAPHS[name]))


def add(repository: Path, name: str, config: str, content: bytes, version: int = 1, file: str = "model.onnx") -> Path:
    """A model as Triton reads it; returns its version's folder."""
    folder = repository / name / str(version)
    folder.mkdir(parents=True)
    (folder / file).write_bytes(content)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}')
    return folder
