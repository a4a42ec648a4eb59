"""House rules as tests: what a reviewer would otherwise have to remember."""

import ast
import functools
import re
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

import trefoil
from tests.support.structure import circles, equal_runs, more_than

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("trefoil", "controller", "dispatcher", "power_agent", "carbon_feed")
LINES_MAX = 600
FUNCTION_LINES_MAX = 60
MODULES_MAX = 20
PAIRS_MAX = 10
REASONS = {
    (
        "dispatcher/routers/single_queue.py",
        "dispatcher/routers/weighted.py",
    ): "a router is read in one file: one-line answers to its protocol, no base class between",
}
"""Equal lines that stay, by the two files they stand in, and why."""
PURE = {"core", "planners", "forecasters", "routers", "queues", "governors", "forecast"}
"""Names of modules and folders that decide: no I/O, no clock, no logs."""
UNFINISHED = re.compile(
    r"NotImplementedError|\bTODO\b|\bFIXME\b|\bXXX\b|\bHACK\b|type: ignore$|except: |except Exception: *pass"
)
HOSTS = re.compile(r"pypi\.|files\.pythonhosted|registry\.npmjs|deb\.debian|index-url|/root/|/home/\w+/|/work/")


def tracked(*patterns: str) -> list[Path]:
    """Files under version control, or, outside a checkout, all files below the packages."""
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


@functools.cache
def tree(path: Path) -> ast.Module:
    """A module, parsed once for all rules."""
    return ast.parse(path.read_text())


def sources() -> list[Path]:
    return [p for p in tracked("*.py") if "_pb2" not in p.name]


@functools.cache
def product() -> list[Path]:
    return [p for p in sources() if p.relative_to(ROOT).parts[0] in PACKAGES]


def test_a_public_name_stands_for_one_class_of_a_package():
    """A class by its name alone is found, and says the same wherever it stands."""
    found = defaultdict(set)
    for path in product():
        package = path.relative_to(ROOT).parts[0]
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[package, node.name].add(str(path.relative_to(ROOT)))
    assert not {f"{package}: {name}": sorted(paths) for (package, name), paths in found.items() if len(paths) > 1}


def test_files_fit_in_the_head():
    long = {str(p.relative_to(ROOT)): n for p in product() if (n := len(p.read_text().splitlines())) > LINES_MAX}
    assert not long


def test_functions_fit_on_a_screen():
    long = []
    for path in product():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {lines} lines")
    assert not long


def test_folders_fit_in_the_head():
    many = more_than(MODULES_MAX, [path.relative_to(ROOT) for path in product()])
    assert not {str(folder): number for folder, number in many.items()}


def test_no_module_imports_itself_in_a_circle():
    """Imports in functions and for type checkers count as well."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert circles(imports) == []


def test_equal_lines_are_few_and_have_a_reason():
    found = equal_runs({path.relative_to(ROOT): path.read_text() for path in product()})
    unexplained = [str(pair) for pair in found if not REASONS.get((str(pair.first), str(pair.second)))]
    assert not unexplained
    assert len(found) <= PAIRS_MAX, [str(pair) for pair in found]
    assert REASONS.keys() <= {(str(pair.first), str(pair.second)) for pair in found}, "a reason for nothing"


def test_cores_and_parts_are_held_pure_wherever_they_lie():
    """Every `core` (a module or a folder) and every folder of parts is in the contract that keeps I/O out."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    held = [
        re.escape(module).replace(r"\*\*", ".+").replace(r"\*", "[^.]+") + r"(\..+)?"
        for contract in contracts
        if "asyncio" in contract.get("forbidden_modules", ())
        for module in contract["source_modules"]
    ]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in product()}
    pure = {name for name in names if name.rpartition(".")[2] in PURE}
    loose = [name for name in sorted(pure) if not any(re.fullmatch(one, name) for one in held)]
    assert not loose


def test_every_module_says_what_it_is():
    bare = [str(p.relative_to(ROOT)) for p in product() if p.read_text().strip() and not ast.get_docstring(tree(p))]
    assert not bare


def test_nothing_is_left_unfinished_or_swallowed():
    marks = [
        f"{path.relative_to(ROOT)}:{i}: {line.strip()}"
        for path in product()
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not marks


def test_no_exception_is_swallowed():
    """`except X: pass` needs a comment that says why, on the same line or the one above `pass`."""
    silent = []
    for path in product():
        lines = path.read_text().splitlines()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
                near = "".join(lines[node.lineno - 1 : node.body[0].lineno])
                if "#" not in near:
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not silent


def test_ways_to_internal_addresses_are_made_at_one_place():
    """What would ask a proxy of the environment is made in `trefoil/direct.py`, or here with its reason."""
    makers = re.compile(
        r"\b(insecure_channel|secure_channel|urlopen|build_opener|InferenceServerClient|AsyncClient|APIClient"
        r"|HTTPS?Connection|OTLPSpanExporter)\((?!.*TRITON_CLIENT)"
    )
    reasons = {
        "trefoil/direct.py": "the place",
        "trefoil/api/client.py": "with TRITON_CLIENT, on a line of its own",
        "dispatcher/request/traced_inference.py": "with NO_PROXY",
        "carbon_feed/providers/web.py": "providers are on the Internet; `proxy` is their setting",
        "power_agent/runtimes/engine_proxy.py": "a Unix socket",
        "trefoil/engine_api.py": "with trust_env=False",
    }
    assert {str(path.relative_to(ROOT)) for path in product() if makers.search(path.read_text())} == reasons.keys()


def test_services_import_nothing_from_the_folder_they_are_started_in():
    """`python -m` puts the current folder first on the path, where another `protos` or `controller` may lie; -P not."""
    by_code, by_unit = re.compile(r'executable, "-m"'), re.compile(r"\bpython(, | )-m\b(?! hatchling)")
    shipped = [(by_code, path) for path in product()]
    shipped += [(by_unit, path) for path in tracked("deploy/**", "docker-compose.yml") if path.suffix != ".md"]
    found = [str(path.relative_to(ROOT)) for loose, path in shipped if loose.search(path.read_text(errors="replace"))]
    assert not found


def test_no_registry_host_and_no_path_of_a_machine():
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked()
        if path.suffix in {".py", ".md", ".toml", ".txt", ".in", ".yml", ".yaml", ".proto", ".csv", ".json"}
        and path.name != "test_tidy.py"
        for match in [HOSTS.search(path.read_text(errors="replace"))]
        if match
    ]
    assert not found


def test_only_named_top_level_packages():
    names = {p.relative_to(ROOT).parts[0] for p in tracked("*/__init__.py")}
    assert names <= {*PACKAGES, "protos", "tests", "benchmarks"}


def test_pynvml_stays_behind_the_devices_package():
    """Real devices read it; the simulated driver stands in for its library."""
    outside = [
        str(p.relative_to(ROOT))
        for p in product()
        if re.search(r"^\s*(import|from) pynvml", p.read_text(), re.M)
        and p.relative_to(ROOT).parts[:2] not in {("power_agent", "devices"), ("power_agent", "simulated")}
    ]
    assert not outside


def test_tables_of_results_are_made_of_what_was_kept():
    """No figure is written by hand, the tables of a section come from one commit, and rows whose sources changed since
    are marked stale."""
    from benchmarks.results import PAGES, with_tables

    assert [page.name for page in PAGES if with_tables(page.read_text()) != page.read_text()] == [], "run make results"


def test_stubs_are_current(tmp_path):
    """The committed stubs are what `make protos` writes."""
    from protos.generate import generate

    for fresh in generate(tmp_path):
        committed = ROOT / fresh.relative_to(tmp_path)
        assert committed.read_bytes() == fresh.read_bytes(), f"{committed} is stale: run `make protos`"


def test_every_lock_pins_by_hash():
    for lock in (ROOT / "requirements").glob("*.txt"):
        pins = re.findall(r"^([A-Za-z0-9_.-]+)==", lock.read_text(), re.M)
        assert pins, lock
        assert lock.read_text().count("--hash=sha256:") >= len(pins), lock


def test_markdown_links_resolve():
    broken = []
    for page in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert not broken


def test_changelog_and_version_agree():
    """The newest release's, or, with entries under Unreleased, that of the next one with `.dev0` (CONTRIBUTING.md)."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    unreleased, heading, released = re.split(r"^## \[(\d[^\]]*)\].*$", changes, maxsplit=1, flags=re.M)
    number, dev, _ = trefoil.__version__.partition(".dev0")
    assert released.strip(), f"{heading} says nothing"
    if re.search(r"^- ", unreleased, re.M):
        assert dev
        assert [int(part) for part in number.split(".")] > [int(part) for part in heading.split(".")]
    else:
        assert (number, dev) == (heading, "")


def test_every_policy_is_documented():
    from trefoil.core.policies import POLICIES

    text = (ROOT / "docs" / "policies.md").read_text()
    assert [name for name in POLICIES if f"`{name}`" not in text] == []
