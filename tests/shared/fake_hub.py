"""A fake Hugging Face hub in a folder, which replaces functions of huggingface_hub in tests."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.hf_api import DatasetInfo

FIRST, SECOND = "1" * 40, "2" * 40


class FakeHub:
    """A hub of data sets and models. While `online` is false, every request fails."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.online = folder, True
        self.asked: list[str] = []
        """names and revisions that were requested"""
        self.fetched: list[str] = []
        """files that were fetched"""
        self._heads: dict[str, str] = {}
        self._cards: dict[str, Any] = {}
        monkeypatch.setenv("MEGATRAIN_CACHE", str(folder / "cache"))
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", self._info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", self._cached)
        self.token: str | None = "token"
        self.role = "write"
        self.models: dict[str, dict[str, bytes]] = {}
        """the models that were uploaded, with their files"""
        self.private: dict[str, bool] = {}
        self.broken = False
        """whether every upload fails"""
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: self.token)
        for method in ("whoami", "model_info", "create_repo", "upload_folder", "upload_file"):
            monkeypatch.setattr(huggingface_hub.HfApi, method, getattr(self, f"_{method}"))

    def write(
        self, name: str, files: dict[str, str], commit: str = FIRST, configs: Any = None
    ) -> None:
        """Adds a commit to a data set."""
        self._heads[name], self._cards[name] = commit, configs
        for file, text in files.items():
            path = self.folder / "hub" / name / commit / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def _info(self, name: str, *, revision: str | None = None, **__: Any) -> DatasetInfo:
        self._refuse_offline(name)
        self.asked.append(f"{name}@{revision}")
        commit = self._heads[name] if revision in (None, "main") else str(revision)
        folder = self.folder / "hub" / name / commit
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return DatasetInfo(
            id=name,
            sha=commit,
            siblings=[
                {"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size}
                for path in files
            ],
            cardData={"configs": self._cards[name]} if self._cards[name] else None,
        )

    def _snapshot(self, name: str, revision: str) -> Path:
        return self.folder / "snapshots" / name / revision

    def _download(
        self, name: str, *, repo_type: str, revision: str, allow_patterns: list[str]
    ) -> str:
        self._refuse_offline(name)
        assert repo_type == "dataset"
        source, target = self.folder / "hub" / name / revision, self._snapshot(name, revision)
        for path in sorted(source.rglob("*")):
            file = path.relative_to(source).as_posix()
            if path.is_file() and any(fnmatch.fnmatch(file, each) for each in allow_patterns):
                self.fetched.append(file)
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target / file)
        return str(target)

    def _cached(self, name: str, file: str, *, revision: str, repo_type: str) -> str | None:
        path = self._snapshot(name, revision) / file
        return str(path) if path.is_file() else None

    def _whoami(self) -> dict[str, Any]:
        self._refuse_offline("whoami")
        return {
            "name": "me",
            "orgs": [{"name": "us"}],
            "auth": {"accessToken": {"role": self.role}},
        }

    def _model_info(self, name: str) -> SimpleNamespace:
        self._refuse_offline(name)
        if name not in self.models:
            missing = huggingface_hub.errors.RepositoryNotFoundError
            raise missing.__new__(missing)
        return SimpleNamespace(private=self.private[name])

    def _create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        self._refuse_offline(name)
        assert exist_ok
        self.models.setdefault(name, {})
        self.private.setdefault(name, private)
        return f"https://hub/{name}"

    def _upload_folder(
        self, *, repo_id: str, folder_path: Path, ignore_patterns: list[str], commit_message: str
    ) -> None:
        if self.broken:
            raise huggingface_hub.errors.OfflineModeIsEnabled("Connection lost.")
        assert commit_message
        self.models[repo_id] |= {
            path.relative_to(folder_path).as_posix(): path.read_bytes()
            for path in Path(folder_path).rglob("*")
            if path.is_file() and path.name not in ignore_patterns
        }

    def _upload_file(
        self, *, repo_id: str, path_or_fileobj: bytes, path_in_repo: str, commit_message: str
    ) -> None:
        assert commit_message
        self.models[repo_id][path_in_repo] = path_or_fileobj

    def _refuse_offline(self, name: str) -> None:
        if not self.online:
            raise huggingface_hub.errors.OfflineModeIsEnabled(f"Cannot reach {name}: offline.")


def jsonl(*texts: str) -> str:
    """Returns the texts as rows of a .jsonl file."""
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)
