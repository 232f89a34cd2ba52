"""Uploads a trained model to the hub, and checks beforehand that this is allowed."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

from megatrain.runtime.files.hub_errors import hub_errors
from megatrain.simulator.base.errors import Interrupted, RunError, UserError

_NAME = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w([\w.-]{0,94}\w)?", re.ASCII)


def describe(parser: argparse.ArgumentParser) -> None:
    """Adds the options `--push-to-hub` and `--public`."""
    parser.add_argument(
        "--push-to-hub",
        metavar="NAME",
        help="upload the model to the hub at the end, as NAME or org/NAME, with a model card; it is"
        " private unless --public is given",
    )
    parser.add_argument(
        "--public", action="store_true", help="with --push-to-hub: make the model public"
    )


def check(args: argparse.Namespace) -> None:
    """Raises UserError if the options contradict each other or the model could not be uploaded.

    Checks the options first, and then asks the hub for the user's name and organizations. If
    `--push-to-hub` has no organization, sets it to USER/NAME.
    """
    name: str | None = args.push_to_hub
    if name is None:
        if args.public:
            raise UserError(
                "--public",
                found="no --push-to-hub",
                allowed="both, or neither",
                fix="name the model on the hub with --push-to-hub NAME",
            )
        return
    if not _NAME.fullmatch(name) or name.endswith(".git"):
        raise UserError(
            "--push-to-hub",
            found=repr(name),
            allowed="NAME or org/NAME, of letters, digits, single -, _ and single ., at most 96",
            fix="choose another name",
        )
    from huggingface_hub import HfApi, get_token

    if not get_token():
        raise UserError(
            "--push-to-hub",
            found="no token of the hub",
            allowed="a token that may write",
            fix="log in with `hf auth login`, or set HF_TOKEN",
        )
    with hub_errors(_unreachable):
        user: dict[str, Any] = HfApi().whoami()
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise UserError(
            "--push-to-hub",
            found="a token that may only read",
            allowed="a token that may write",
            fix="make one at https://huggingface.co/settings/tokens",
        )
    own = str(user["name"])
    homes = [own, *(str(organization["name"]) for organization in user.get("orgs", []))]
    home = name.partition("/")[0] if "/" in name else own
    if home not in homes:
        raise UserError(
            "--push-to-hub",
            found=name,
            allowed=f"a model of {', '.join(homes)}",
            fix=f"name it {own}/{name.partition('/')[2]}, or log in as another user",
        )
    args.push_to_hub = f"{home}/{name.rpartition('/')[2]}"
    private = _is_private(args.push_to_hub)
    if private is False and not args.public:
        raise UserError(
            "--push-to-hub",
            found=f"{args.push_to_hub}, which exists and is public",
            allowed="a new or a private model",
            fix="add --public, or choose another name",
        )
    if private and args.public:
        raise UserError(
            "--public",
            found=f"{args.push_to_hub}, which exists and is private",
            allowed="a new or a public model",
            fix="leave --public out, make the model public on its page, or choose another name",
        )


def _is_private(name: str) -> bool | None:
    """Returns whether the model `name` on the hub is private. None if the hub does not have it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    with hub_errors(_unreachable):
        try:
            return bool(HfApi().model_info(name).private)
        except RepositoryNotFoundError:
            return None


def upload(folder: Path, card: str, args: argparse.Namespace, again: list[str]) -> None:
    """Uploads the model in `folder` with its card, and prints its address.

    Args:
        folder: the model folder. Its README.md is not uploaded.
        card: the model card, in Markdown, which is uploaded as README.md.
        args: the options `push_to_hub`, with its organization, and `public`.
        again: the first words of the command that repeats the upload.

    Raises RunError, which names this command, if the upload fails.
    """
    words = [*again, "--push-to-hub", args.push_to_hub, *(["--public"] if args.public else [])]
    command = " ".join(map(shlex.quote, words))
    from huggingface_hub import HfApi

    print(f"uploading {folder} to {args.push_to_hub}", flush=True)
    try:
        with hub_errors(lambda reason: _failed(args.push_to_hub, reason, command)):
            api = HfApi()
            address = api.create_repo(args.push_to_hub, private=not args.public, exist_ok=True)
            api.upload_folder(
                repo_id=args.push_to_hub,
                folder_path=folder,
                ignore_patterns=["README.md"],
                commit_message="Upload the model",
            )
            api.upload_file(
                repo_id=args.push_to_hub,
                path_or_fileobj=card.encode(),
                path_in_repo="README.md",
                commit_message="Describe the model",
            )
    except UserError as error:
        raise RunError(str(error)) from None
    except (KeyboardInterrupt, Interrupted) as error:
        error.add_note(f"not uploaded; upload again with: {command}")
        raise
    print(f"uploaded {address}")


def _unreachable(reason: str) -> UserError:
    return UserError(
        "--push-to-hub",
        found=f"a hub that does not answer ({reason})",
        allowed="a network and a valid token",
        fix="log in with `hf auth login`, or leave it out and upload later with"
        " `megatrain export RUN --push-to-hub NAME`",
    )


def _failed(name: str, reason: str, command: str) -> UserError:
    return UserError(
        f"upload of {name}",
        found=reason,
        allowed="a hub that can be reached, and room there",
        fix=f"nothing is lost; upload again with: {command}",
    )
