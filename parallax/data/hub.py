"""Data sets by name, of the Hugging Face hub or in a folder, read row by row through the `datasets` library."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

from parallax.config.paths import DatasetName, dataset_of
from parallax.errors import ConfigError, DataError, first_line, imported, names_of, quoted
from parallax.storage.files import open_copy

# Fields of a reader's configuration that say which files it reads, and what they are called.
OF_FILES = {"name", "version", "data_dir", "data_files", "description"}


class NamedDataset:
    """A split of a data set. Its files are found when it is opened, and are read when its documents are.

    Nothing of a data set is run as code: the library has no scripts since version 4, and reads no pickles since 5.
    """

    def __init__(self, path: str):
        self._path, self._name = path, dataset_of("data.path", path)
        library = imported("datasets", "data.source='dataset'", "datasets")
        if int(library.__version__.partition(".")[0]) < 5:
            raise ConfigError(f"datasets {library.__version__} can run code of a data set; install 5 or newer")
        with self._reading():
            options = {"name": self._name.config or None, "revision": self._name.revision or None}
            self._builder = library.load_dataset_builder(self._name.name, **options)
        self._files = self._files_of(self._builder.config.data_files or {}, self._name)

    def _files_of(self, by_split: Mapping[Any, Sequence[str]], name: DatasetName) -> list[str]:
        splits = {str(split): list(files) for split, files in by_split.items()}
        if name.split not in splits:
            known = names_of(splits) or "none"
            raise DataError(f"data.path={quoted(self._path)} has no split {quoted(name.split)}; its splits: {known}")
        return splits[name.split]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (ConfigError, DataError, MemoryError):
            raise
        except Exception as error:  # of the library, or of any that it reads with
            raise DataError(f"data.path={quoted(self._path)} cannot be read: {first_line(error)}") from error

    @property
    def description(self) -> dict[str, Any]:
        """What determines its rows: the hash of local files; of others their addresses, which have a revision. Options
        that its README gives to the reader are among it."""
        digest = hashlib.sha256()
        if all(Path(file).is_file() for file in self._files):
            with self._reading():
                for file in self._files:
                    digest.update(Path(file).suffix.lower().encode())  # says how it is read
                    with open_copy(Path(file)) as opened:
                        digest.update(hashlib.file_digest(opened, "sha256").digest())
            about = {"config": self._name.config}
        else:
            digest.update("\n".join(self._files).encode())
            about = self._name._asdict()
        options = {"options": self._options} if self._options else {}
        return {**about, "files": len(self._files), "sha256": digest.hexdigest(), **options}

    @cached_property
    def _options(self) -> dict[str, str]:
        """Options of the reader, and types of columns, that are not the usual ones."""
        chosen, usual = self._builder.config, type(self._builder.config)()
        names = sorted({field.name for field in fields(chosen)} - OF_FILES)
        options = {name: getattr(chosen, name) for name in names if getattr(chosen, name) != getattr(usual, name)}
        options |= {"features": self._builder.info.features} if self._builder.info.features else {}
        return {name: repr(value) for name, value in options.items()}

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The rows in their order, with their places."""
        with self._reading():
            rows = self._builder.as_streaming_dataset(split=self._name.split)
            for number, row in enumerate(rows, start=1):
                yield f"{self._path}, row {number}", row
