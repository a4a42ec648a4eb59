"""Input files of batches (OpenAI's /v1/files): one folder for each, in the jobs folder. All methods block, as those of
the jobs folder do.

<jobs>/.files/<id>/file.json    tenant, name, size and when it came; the folder is moved into place when it is whole
                   items.bin    its bytes
<jobs>/.files/.new-<tenant's hash>-*/    an upload; its items.bin is as long as what it has reserved
"""

import contextlib
import hashlib
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from dispatcher.jobs.core.job import Bounds
from dispatcher.jobs.entries import ITEMS, NEW, Entries, Incoming, locked, sweep
from dispatcher.jobs.folder import KEPT_FACTOR
from trefoil.core.errors import InvalidInput, NotFound
from trefoil.runtime.files import replace_file
from trefoil.runtime.state_files import of_shape

FOLDER: Final = ".files"
INFO: Final = "file.json"
NAME_CHARS_MAX: Final = 256
STEPS: Final = 64
"""An upload reserves ahead this part of all bytes that a tenant may have."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as it was uploaded."""

    id: str
    tenant: str
    filename: str
    size: int
    created_at_s: float


class FilesFolder(Entries[FileInfo]):
    """Files of all tenants; each sees its own. They go `keep_s` after they came."""

    def __init__(self, jobs: Path, bounds: Bounds, keep_s: float) -> None:
        super().__init__(jobs / FOLDER, INFO, lambda _name, tree: of_shape(FileInfo, tree))
        self._bounds, self._keep_s = bounds, keep_s

    def expires_at_s(self, info: FileInfo) -> float:
        """When a file goes [UTC s]."""
        return info.created_at_s + self._keep_s

    def get(self, name: str, tenant: str) -> FileInfo:
        """A file of a tenant. Raises NotFound."""
        found = self.find(name)
        if found is None or found.tenant != tenant:
            raise NotFound("is not a file of yours", field="file_id", value=name, remedy="GET /v1/files names them")
        return found

    def all(self, tenant: str) -> list[FileInfo]:
        """Files of a tenant, the oldest first."""
        found = [each for each in map(self.find, self.ids()) if each is not None and each.tenant == tenant]
        return sorted(found, key=lambda each: (each.created_at_s, each.id))

    def path(self, info: FileInfo) -> Path:
        """Where the bytes of a file lie."""
        return self.root / info.id / ITEMS

    def expire(self, now_s: float, uploads_older_s: float) -> None:
        """Remove files that are too old, and what uploads left."""
        if not self.root.exists():
            return
        for name in self.ids():
            info = self.find(name)
            if info is not None and self.expires_at_s(info) < now_s:
                self.remove(name)
        sweep(self.root, uploads_older_s)

    @staticmethod
    def uploads_of(tenant: str) -> str:
        """What folders of a tenant's uploads begin with."""
        return f"{NEW}{hashlib.sha256(tenant.encode()).hexdigest()[:16]}-"

    def reserve(self, upload: Path, tenant: str, size: int) -> int:
        """Reserve room for an upload of so many bytes, and for some of those that follow; returns for how many.

        Raises:
            InvalidInput: the tenant has too many.
            OSError: the disk refuses.
        """
        with locked(self.root):
            reserved = min(self.check_room(tenant, size, upload), size + self._bounds.bytes_max // STEPS)
            os.truncate(upload / ITEMS, reserved)
        return reserved

    def check_room(self, tenant: str, size: int, upload: Path | None = None) -> int:
        """Check that a tenant may have one file more, of so many bytes; returns how many it may have. Its other uploads
        count as what they have reserved. Raises InvalidInput.
        """
        uploads = self.root.glob(f"{self.uploads_of(tenant)}*/{ITEMS}")
        others = [_size(path) for path in uploads if path.parent != upload]
        files, most = self.all(tenant), KEPT_FACTOR * self._bounds.tenant_max
        if len(files) >= most:
            remedy = f"delete some: at most {most}, ten times the dispatcher's jobs_tenant_max"
            raise InvalidInput("has too many files", field="tenant", value=tenant, remedy=remedy)
        room = self._bounds.bytes_max - sum(each.size for each in files) - sum(others)
        if size > room:
            total = self._bounds.bytes_max - room + size
            why = f"its files, with {len(others)} other uploads, would have {total} bytes"
            remedy = f"delete some, or upload one after the other: at most {self._bounds.bytes_max} bytes in all, the "
            raise InvalidInput(why, field="tenant", value=tenant, remedy=f"{remedy}dispatcher's jobs_bytes_max")
        return room


class FileUpload(Incoming):
    """A file on its way to disk. It is none before `commit`."""

    def __init__(self, folder: FilesFolder, tenant: str) -> None:
        """Raises InvalidInput: the tenant has too many. OSError: the disk refuses."""
        folder.check_room(tenant, 0)
        super().__init__(folder.root, folder.uploads_of(tenant))
        self._folder, self._tenant = folder, tenant
        self._size = self._reserved = 0

    def add(self, data: bytes) -> None:
        """Add bytes. Raises InvalidInput: they are too many. OSError: the disk refuses."""
        self._size += len(data)
        if self._size > self._reserved:  # not only at its end, when the disk may be full of it
            self._reserved = self._folder.reserve(self.path, self._tenant, self._size)
        self._write(data)

    def commit(self, filename: str, now_s: float) -> FileInfo:
        """Make it a file. Raises as `add`."""
        self._file.truncate(self._size)  # what was reserved beyond it is free again
        self._close()
        name = f"file-{uuid.uuid4().hex[:24]}"
        info = FileInfo(name, self._tenant, filename[:NAME_CHARS_MAX], self._size, now_s)
        replace_file(self.path / INFO, json.dumps(asdict(info)), mode=0o600)
        with locked(self._root):
            self._folder.check_room(self._tenant, self._size, self.path)
            self._place(name)
        return info


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # discarded meanwhile
        return path.stat().st_size
    return 0
