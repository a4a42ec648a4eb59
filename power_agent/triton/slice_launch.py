"""Triton of a slice: writes the slice's model repository and builds argv and env of its Triton.

    <slice repository>/<family>/config.pbtxt           generated: one backend, one version, one instance group.
                               labels.txt              link to the shared model_repository, as all model files.
                               <version>/model.onnx
                               <version>/model.py      link to model_repository/_shared/model.py. Of a generative
                                                       family (its contract names decoder.py) also to what decodes,
                                                       of python models (opaque.py) to what runs them.

Every version of the family is linked, only one is loaded, so a swap needs no file but the new config.pbtxt.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from power_agent.triton.access import HEADER, RESTRICTED, TritonFiles
from power_agent.triton.installation import TritonInstall
from trefoil.core.device_types import cpu_quota
from trefoil.core.errors import CatalogError, SettingError
from trefoil.core.fleet import Hosted, SliceKey
from trefoil.runtime.files import replace_file
from trefoil.runtime.given.llm_backends import ENGINE_PATH, LLM_FILES, TENSORRT_LLM, VLLM
from trefoil.runtime.given.repository_names import boundary, names_below, resolved
from trefoil.runtime.model_files import (
    CONFIG,
    DECODER,
    ENGINES,
    OPAQUE,
    THREADS,
    backend_of,
    contract,
    expected_files,
    generative,
    how_to_make,
    judged_versions,
    label_files,
    not_graphs,
    opaque,
    shared_files,
)

LOOPBACK: Final = "127.0.0.1"
WILDCARD: Final = "0.0.0.0"  # all addresses of this machine
LLM_KINDS: Final = {
    VLLM: model_config_pb2.ModelInstanceGroup.KIND_MODEL,
    TENSORRT_LLM: model_config_pb2.ModelInstanceGroup.KIND_CPU,
}
"""Kinds of instances by which a backend takes the GPU of its environment: of KIND_GPU vLLM's would take GPU 0."""
GPUS_MAX: Final = 16  # of one node
PORTS_PER_GPU: Final = 16  # two for each of 8 memory slices
TENTHS: Final = 10
SHARED: Final = "_shared"
SHARED_MEMORY: Final = Path("/dev/shm")
BACKENDS_LINK: Final = "../.backends"  # from a slice's repository
_OF_A_SHELL: Final = re.compile(r"[^\w@%+=:,./-]")
# Everything else stays out of Triton. By the launch id a launcher finds what outlives its parents.
PASSED_ON: Final = ("HOME", "TMPDIR", "LANG", "LC_ALL", "TZ", "TREFOIL_LAUNCH_ID")
LLM_PASSED_ON: Final = ("VLLM_", "HF_HOME", "HF_HUB_")
"""Beginnings of further names, to slices of language models: engine settings, where weights are kept."""
SECRETS: Final = ("_KEY", "_TOKEN")
"""Ends of names that are not passed on."""
LAUNCHED_AS: Final = "TREFOIL_LAUNCHED_AS"
"""Says whose a Triton is, for an agent without a journal: "<cluster>/<node>/<tag>"."""


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """Specification of what one slice's Triton shall serve, and where."""

    name: str  # SliceKey.name, path-safe
    repository: Path  # this slice's own folder; created, rewritten idempotently
    source: Path  # the shared model_repository
    hosted: Sequence[Hosted]
    grpc_port: int
    metrics_port: int
    gpu_uuid: str  # of the MIG device or the whole GPU; "" = none is visible
    cpu_cores: tuple[int, ...] | None = None  # of a slice of pinned cores: their numbers at the kernel
    cpu_quota: float | None = None  # of a slice that is a share of all cores [cores]
    exit_timeout_s: int = 5
    listen: str = LOOPBACK  # IPv4 address
    published_host: str = LOOPBACK  # by which others reach it; an IPv6 address in brackets
    key: str = ""  # that opens what is the agent's alone; "" = it is open
    tls: TritonFiles | None = None
    launched_as: str = ""  # see LAUNCHED_AS

    @property
    def metrics_listen(self) -> str:
        """Address of its metrics, for which Triton has no TLS."""
        return LOOPBACK if self.tls is not None else self.listen

    @property
    def threads(self) -> int:
        """Threads for each instance of a model: a CPU slice's cores are shared out, and a GPU's host work needs one.

        More would get in each other's way.
        """
        cores = len(self.cpu_cores) if self.cpu_cores is not None else math.ceil(self.cpu_quota or 1)
        return max(1, cores // max(1, sum(max(1, hosted.instances) for hosted in self.hosted)))


@dataclass(frozen=True, slots=True)
class SliceLaunch:
    """Launch of one slice's Triton: the complete command. `env` is the whole environment, not an addition."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    repository: Path
    grpc_target: str  # "127.0.0.1:8200", for the agent itself
    metrics_url: str  # "http://127.0.0.1:8201/metrics"
    published_target: str  # "gpu7:8200", for other hosts
    published_metrics_url: str  # "" = no other process reaches them
    shm_prefix: str  # /dev/shm/<prefix>* belongs to this slice; see clean_shared_memory
    source: Path  # the shared model_repository that the repository's links lead to
    ports: Mapping[int, str] = field(default_factory=dict)  # gRPC, metrics: address at which a runtime publishes it
    files: tuple[Path, ...] = ()  # that its command names, beside folders
    key: str = ""
    gpu_uuid: str = ""  # what it may compute on, for runtimes that have to set it up
    cpu_cores: tuple[int, ...] | None = None
    cpu_quota: float | None = None

    def at(self, host: str) -> Self:
        """This launch of a Triton with a separate address; of one without (""), as it is."""
        if not host:
            return self
        shown = f"[{host}]" if ":" in host else host
        target = f"{shown}:{self.grpc_target.rpartition(':')[2]}"
        metrics = f"http://{shown}:{urlsplit(self.metrics_url).port}/metrics"
        published = metrics if self.published_metrics_url else ""
        return replace(
            self, grpc_target=target, metrics_url=metrics, published_target=target, published_metrics_url=published
        )


def grpc_port(base: int, key: SliceKey) -> int:
    """Port of a slice's gRPC; its metrics are one above. Slices that share no resource share no port.

    It is base + 16 g + 2 s for start s on GPU g < 16. It is base + 256 + 2 t for a CPU slice that begins at tenth t of
    a core.

    Raises:
        SettingError: there is no such port.
    """
    name = key.device.rpartition("/")[2]
    if name == "cpu":
        tenth = key.start if cpu_quota(key.slice_type) is not None else TENTHS * key.start
        port = base + PORTS_PER_GPU * GPUS_MAX + 2 * tenth
    else:
        index = int(name.removeprefix("gpu"))
        if index >= GPUS_MAX:
            raise SettingError(f"a node has at most {GPUS_MAX} GPUs", field="device", value=key.device)
        port = base + PORTS_PER_GPU * index + 2 * key.start
    if port + 1 > 65535:
        remedy = "lower it: a node needs 256 ports for its GPUs and 20 for each core of its CPUs"
        raise SettingError(f"no port is left for {key.name}", field="triton_port_base", value=base, remedy=remedy)
    return port


def prepare_slice(install: TritonInstall, spec: SliceSpec) -> SliceLaunch:
    """Write the repository (config.pbtxt, links to ONNX files and the shared model.py) and return the command.

    Raises:
        CatalogError: naming family, version and path when the source lacks something.
    """
    more: dict[str, str] = {}
    for hosted in spec.hosted:
        family = contract(spec.source, hosted.model)
        write_family(spec.repository, spec.source, hosted, family, choose_backend(install, spec, family))
        if backend_of(family) in LLM_FILES:
            passed_on = (name for name in os.environ if name.startswith(LLM_PASSED_ON) and not name.endswith(SECRETS))
            more = {name: os.environ[name] for name in passed_on}
    if backends_name(install.backends) == BACKENDS_LINK:
        _link(spec.repository / BACKENDS_LINK, install.backends.resolve())
    launch = launch_of(install, spec)
    return replace(launch, env={**more, **launch.env})


def launch_of(install: TritonInstall, spec: SliceSpec) -> SliceLaunch:
    """Launch of a slice whose repository is there already."""
    shm_prefix = f"trefoil-{spec.name}-{spec.grpc_port}-"
    own_host = LOOPBACK if spec.listen == WILDCARD else spec.listen
    return SliceLaunch(
        argv=_argv(install, spec, shm_prefix),
        env=_env(install, spec),
        cwd=spec.repository,
        repository=spec.repository,
        grpc_target=f"{own_host}:{spec.grpc_port}",
        metrics_url=f"http://{own_host if spec.tls is None else LOOPBACK}:{spec.metrics_port}/metrics",
        published_target=f"{spec.published_host}:{spec.grpc_port}",
        published_metrics_url=f"http://{spec.published_host}:{spec.metrics_port}/metrics" if spec.tls is None else "",
        shm_prefix=shm_prefix,
        source=spec.source,
        ports={spec.grpc_port: spec.listen, spec.metrics_port: spec.metrics_listen},
        files=(spec.tls.certificate, spec.tls.key, spec.tls.ca) if spec.tls is not None else (),
        key=spec.key,
        gpu_uuid=spec.gpu_uuid,
        cpu_cores=spec.cpu_cores,
        cpu_quota=spec.cpu_quota,
    )


def _argv(install: TritonInstall, spec: SliceSpec, shm_prefix: str) -> tuple[str, ...]:
    listen, metrics_listen = (WILDCARD,) * 2 if install.own_network else (spec.listen, spec.metrics_listen)
    return (
        str(install.binary),
        f"--id={spec.name}",
        f"--model-repository={repository_name(spec.repository)}",
        f"--backend-directory={backends_name(install.backends)}",
        f"--cache-directory={install.caches.resolve()}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        "--model-control-mode=explicit",
        *(f"--load-model={hosted.model}" for hosted in spec.hosted),
        "--disable-auto-complete-config",  # the config is complete; auto-complete would start every stub twice
        "--allow-http=false",
        f"--http-address={LOOPBACK}",
        f"--grpc-address={listen}",
        f"--grpc-port={spec.grpc_port}",
        f"--metrics-address={metrics_listen}",
        f"--metrics-port={spec.metrics_port}",
        "--allow-gpu-metrics=false",  # not available in MIG mode; the agent meters the whole GPU
        "--allow-cpu-metrics=false",
        f"--exit-timeout-secs={spec.exit_timeout_s}",
        "--log-format=ISO8601",
        *((f"--grpc-restricted-protocol={RESTRICTED}:{HEADER}={spec.key}",) if spec.key else ()),
        *(_tls_options(spec.tls) if spec.tls is not None else ()),
    )


def repository_name(repository: Path) -> str:
    """A slice's repository as its Triton's command names it: the python backend starts its stubs by `bash -c`, with
    paths unquoted. A path that a shell would read otherwise is named from the folder that the Triton starts in."""
    path = repository.resolve()
    return str(path) if _OF_A_SHELL.search(str(path)) is None else os.path.join("..", "..", *path.parts[-2:])


def backends_name(backends: Path) -> str:
    """Triton's backends, named likewise: if need be by a link that `prepare_slice` makes."""
    path = str(backends.resolve())
    return path if _OF_A_SHELL.search(path) is None else BACKENDS_LINK


def _tls_options(files: TritonFiles) -> tuple[str, ...]:
    return (
        "--grpc-use-ssl=true",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={files.certificate}",
        f"--grpc-server-key={files.key}",
        f"--grpc-root-cert={files.ca}",
    )


def _env(install: TritonInstall, spec: SliceSpec) -> dict[str, str]:
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    env["PATH"] = os.pathsep.join([str(install.environment.absolute() / "bin"), os.environ.get("PATH", os.defpath)])
    if spec.gpu_uuid and install.sees_gpus:
        env["TREFOIL_ON_GPU"] = "1"  # model.py refuses to compute on the CPU instead
    if not install.libpython_loads:
        env["LD_LIBRARY_PATH"] = install.libpython_folder
    return env | {
        **({LAUNCHED_AS: spec.launched_as} if spec.launched_as else {}),
        "CUDA_VISIBLE_DEVICES": spec.gpu_uuid,
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(spec.threads),
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",  # arenas of 64 MiB per thread would be most of a stub's memory
    }


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Backend that executes a slice's models, and how."""

    backend: str = "python"
    on_gpu: bool = False
    threads: int = 0  # of the onnxruntime backend for one request; 0 = its own choice


def refuse_missing(install: TritonInstall, family: model_config_pb2.ModelConfig) -> None:
    """Refuse a family whose backend this Triton lacks.

    Raises:
        CatalogError: naming the backend.
    """
    backend = backend_of(family)
    if (backend == ENGINES or backend in LLM_FILES) and backend not in install.offers:
        place = install.backends / backend
        remedy = f"take a Triton that has it: NVIDIA's image with that backend (docker_image), or put it at {place}"
        why = f"its models are {not_graphs(family)}, and {install.backends} has no backend {backend}"
        raise CatalogError(why, field="family", value=family.name, remedy=remedy)


def choose_backend(install: TritonInstall, spec: SliceSpec, family: model_config_pb2.ModelConfig) -> BackendChoice:
    """Choose the backend of a family on a slice.

    The python backend places models itself (model.py), so its instances are the CPU's for Triton.

    Raises:
        CatalogError: the family wants another backend or a real GPU, which are not here.
    """
    on_gpu = bool(spec.gpu_uuid) and install.sees_gpus
    backend = backend_of(family)
    if backend == ENGINES or backend in LLM_FILES:
        refuse_missing(install, family)
        if on_gpu or backend == VLLM:  # which has builds for CPUs
            return BackendChoice(backend, on_gpu)
        remedy = "serve it on a real GPU" + (", or import its ONNX files instead" if backend == ENGINES else "")
        why = f"slice {spec.name} has no real GPU, and its models are {not_graphs(family)}"
        raise CatalogError(why, field="family", value=family.name, remedy=remedy)
    if opaque(family):
        return BackendChoice(on_gpu=on_gpu)
    if install.backend == "python" or generative(family):
        return BackendChoice()
    if on_gpu:
        return BackendChoice(install.backend, on_gpu=True)
    of_cpus = spec.cpu_cores is not None or spec.cpu_quota is not None
    return BackendChoice(install.backend, threads=spec.threads if of_cpus else 0)


def backend_of_slice(config: model_config_pb2.ModelConfig) -> BackendChoice:
    """Backend by a slice's own configuration."""
    on_gpu = any(group.kind == model_config_pb2.ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    threads = config.parameters[THREADS].string_value if THREADS in config.parameters else "0"
    return BackendChoice(config.backend, on_gpu, int(threads))


def slice_config(
    contract: model_config_pb2.ModelConfig, hosted: Hosted, serving: BackendChoice, repository: Path
) -> model_config_pb2.ModelConfig:
    """Configuration that serves one variant of the family on one slice, from that slice's repository. Pure.

    Requests are executed one by one unless the family's contract asks for dynamic batching: planner and queueing kernel
    count a request as one executed batch.
    """
    config = model_config_pb2.ModelConfig()
    config.CopyFrom(contract)
    config.backend, config.platform = serving.backend, ""
    if (
        serving.backend != ENGINES and serving.backend not in LLM_FILES
    ):  # whose files have other names, also by compute capability (cc_model_filenames)
        config.default_model_filename = DECODER if generative(contract) else OPAQUE if opaque(contract) else ""
        config.cc_model_filenames.clear()
    groups = model_config_pb2.ModelInstanceGroup
    config.ClearField("instance_group")
    kind = groups.KIND_GPU if serving.on_gpu else groups.KIND_CPU
    kind = LLM_KINDS.get(serving.backend, kind)
    config.instance_group.add(kind=kind, count=1 if serving.backend in LLM_FILES else max(1, hosted.instances))
    config.parameters.pop(THREADS, None)
    if serving.threads:
        config.parameters[THREADS].string_value = str(serving.threads)
    if serving.backend == TENSORRT_LLM:
        config.parameters[ENGINE_PATH].string_value = str(repository / config.name / str(hosted.version))
    config.version_policy.Clear()
    config.version_policy.specific.versions.append(hosted.version)
    return config


def config_json(config: model_config_pb2.ModelConfig) -> str:
    """Configuration as the JSON that RepositoryModelLoad takes as an override."""
    return str(json_format.MessageToJson(config, preserving_proto_field_name=True, indent=None))


def write_family(
    repository: Path, source: Path, hosted: Hosted, family: model_config_pb2.ModelConfig, serving: BackendChoice
) -> None:
    """Write the family's folder of a slice so that it holds what `hosted` needs; what is right already is left alone.

    Raises:
        CatalogError: naming family, version and path when the source lacks something.
    """
    shared = [source / SHARED / name for name in shared_files(family)]
    expected, below = expected_files(family), boundary(source, hosted.model)
    versions, refused = judged_versions(source, family)
    gone = next((path for path in shared if not path.is_file()), None)
    if hosted.version in refused:
        why = f"version {hosted.version} of family {hosted.model} cannot be served: {refused[hosted.version]}"
        raise CatalogError(why, field="version", value=hosted.version)
    if gone is not None or hosted.version not in versions:
        folder = source / hosted.model / str(hosted.version)
        lacks = next((folder / name for name in expected if not (folder / name).is_file()), folder)
        missing = gone if hosted.version in versions else lacks
        raise CatalogError(
            f"version {hosted.version} of family {hosted.model} cannot be served: "
            f"{'' if versions else 'no model files: '}{missing} is missing",
            field="version",
            value=hosted.version,
            remedy=f"one of {sorted(versions)}" if versions else how_to_make(source, hosted.model),
        )
    for version, files in versions.items():
        folder = repository / hosted.model / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        for place, file in names_below(source / hosted.model / str(version), files).items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            _link(folder / place, resolved(file, below))
        for path in shared:
            _link(folder / path.name, resolved(path, boundary(source, SHARED)))
    for label in label_files(family):
        if not (source / hosted.model / label).is_file():
            remedy = "put that file beside its config.pbtxt"
            raise CatalogError(f"{source / hosted.model / label} is missing", field="label_filename", remedy=remedy)
        _link(repository / hosted.model / label, resolved(source / hosted.model / label, below))
    write_config(repository, slice_config(family, hosted, serving, repository))


def write_config(repository: Path, config: model_config_pb2.ModelConfig) -> None:
    """Replace a family's config.pbtxt of a slice at once, so that no Triton ever reads half of it."""
    path = repository / config.name / CONFIG
    replace_file(path, text_format.MessageToString(config), sync=False)
    path.chmod(0o644)  # whatever the umask: a Triton runs as another user


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and Path(os.readlink(link)) == target:
        return
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    os.replace(fresh, link)


def clean_shared_memory(shm_prefix: str) -> int:
    """Remove the regions that a killed Triton of this slice left behind. Call it only when its process is gone."""
    left = list(SHARED_MEMORY.glob(f"{shm_prefix}*")) if shm_prefix else []
    for region in left:
        region.unlink(missing_ok=True)
    return len(left)
