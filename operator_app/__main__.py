"""The command line: ``python -m operator_app [run|crd|render|explain|audit]``.

Errors are one sentence on standard error and a non-zero exit: 2 for what the user gave, 1 for what went wrong.
"""

import argparse
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import anyio
import yaml
from pydantic import ValidationError

if __name__ == "__main__":
    # Before the long imports: as process 1 of a container there is no default action, and SIGTERM would be ignored.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

from operator_app import app
from operator_app.api.crd import crds, to_yaml
from operator_app.api.kinds import CONFIG_MAP, ENVOY_PROXY, FIELD_MANAGER, Key, Object
from operator_app.api.models import parse_spec, problem_of, sentence
from operator_app.desired import children
from operator_app.errors import ConfigurationError, OperatorError, TerminalError, ThrottledError
from operator_app.explain import explain
from operator_app.kube.client import Cluster
from operator_app.observability.logs import configure_logging
from operator_app.preflight import read_cluster_uid
from operator_app.registration.audit import (
    Finding,
    FindingKind,
    as_json,
    findings,
    fix,
    held_by_pause,
    orphans,
    outside_entries,
    refusal,
    resting,
    survey,
    table,
)
from operator_app.registration.ledger import proxy_of
from operator_app.registration.plugins import open_registries
from operator_app.registration.registrar import Registries
from operator_app.settings import ENV_PREFIX, Settings

RETRY_WITHIN_S: Final = 30.0
"""Commands repeat reads that the API server answers with 429 for this long: just after CRDs were installed it does."""

T = TypeVar("T")

_RENDERED_UID = "00000000-0000-0000-0000-000000000000"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "run")
    parsed = parser.parse_args(given)
    match parsed.command:
        case "crd":
            sys.stdout.write(to_yaml(crds()))
            return 0
        case "render":
            return _render(parsed.file, parsed.image, envoy=parsed.envoy)
        case "explain":
            return _explain(parsed)
        case "audit":
            return _audit(parsed)
        case _:
            return _run(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="operator_app", description="Gives every EnvoyProxy its own Envoy, and keeps it as declared."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run", help="run the operator (the default)", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_settings(run)
    commands.add_parser("crd", help="print the CustomResourceDefinitions")
    render = commands.add_parser("render", help="print the children of EnvoyProxies in a file, without a cluster")
    render.add_argument("-f", "--file", required=True, metavar="FILE", help="YAML manifests; - reads standard input")
    render.add_argument(
        "--image", default=Settings.model_fields["image"].default, help="Envoy image where the spec names none"
    )
    render.add_argument("--envoy", action="store_true", help="print what Envoy reads, and not the children")
    explained = commands.add_parser("explain", help="tell who owns which field of a proxy's children; writes nothing")
    explained.add_argument("proxy", metavar="NAMESPACE/NAME")
    explained.add_argument("--kubeconfig", default=argparse.SUPPRESS, metavar="FILE", help="as for run")
    explained.add_argument("--context", default=argparse.SUPPRESS, metavar="NAME", help="as for run")
    explained.add_argument(
        "--image", default=argparse.SUPPRESS, help="the operator's --image, where it is not the default"
    )
    check = commands.add_parser("audit", help="hold proxies against records, here and outside; exit code 1: findings")
    check.add_argument("--fix", action="store_true", help="remove what provably is left from proxies that are gone")
    check.add_argument("-o", "--output", choices=("table", "json"), default="table", help="json: one object")
    _add_settings(check)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    for name, field in Settings.model_fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=f"{field.description} ({ENV_PREFIX}{name.upper()}, default {field.default})",
        )


def _explain(parsed: argparse.Namespace) -> int:
    namespace, slash, name = parsed.proxy.partition("/")
    if not (namespace and slash and name) or "/" in name:
        return _complain(f"{parsed.proxy!r} is not NAMESPACE/NAME", code=2)

    async def explanation(settings: Settings) -> str:
        async with Cluster.connect(
            kubeconfig=settings.kubeconfig, context=settings.context, user_agent=FIELD_MANAGER
        ) as cluster:
            key = Key(namespace, name)
            return await _while_throttled(
                lambda: explain(
                    cluster,
                    key,
                    default_image=settings.image,
                    installation=settings.namespace,
                    run_as_user=settings.run_as_user,
                )
            )

    try:
        sys.stdout.write(anyio.run(explanation, _settings(parsed)))
    except ConfigurationError as error:
        return _complain(str(error), code=2)
    except ValidationError as error:
        return _complain(f"{parsed.proxy}: {sentence(error)}", code=2)
    except ValueError as error:
        return _complain(" ".join(str(error).split()), code=2)
    except OperatorError as error:
        return _complain(" ".join(str(error).split()))
    return 0


def _settings(parsed: argparse.Namespace) -> Settings:
    """The settings from flags and environment. Raises ``ConfigurationError``."""
    flags = {name: value for name, value in vars(parsed).items() if name in Settings.model_fields}
    try:
        return Settings(**flags)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        where = f"{ENV_PREFIX}{name.upper()} (--{name.replace('_', '-')}): " if name else ""
        raise ConfigurationError(f"{where}{problem_of(first)}") from error


def _audit(parsed: argparse.Namespace) -> int:
    try:
        settings = _settings(parsed)
        configure_logging(settings.log_level, settings.log_format)
        return anyio.run(_audited, settings, parsed.fix, parsed.output == "json")
    except ConfigurationError as error:
        return _complain(str(error), code=2)
    except OperatorError as error:
        return _complain(" ".join(str(error).split()))


async def _while_throttled(read: Callable[[], Awaitable[T]]) -> T:
    """The result of ``read``, repeated while the API server answers 429, for ``RETRY_WITHIN_S`` seconds."""
    deadline_mono = anyio.current_time() + RETRY_WITHIN_S
    while True:
        try:
            return await read()
        except ThrottledError as error:
            pause_s = min(max(error.retry_after_s or 1.0, 0.1), 10.0)
            if anyio.current_time() + pause_s > deadline_mono:
                raise
            await anyio.sleep(pause_s)


async def _audited(settings: Settings, is_fixing: bool, is_json: bool) -> int:  # noqa: FBT001 - anyio.run takes no keywords
    """Print the findings, remove with ``is_fixing`` what may be removed, and return the exit code."""
    async with (
        Cluster.connect(kubeconfig=settings.kubeconfig, context=settings.context, user_agent=FIELD_MANAGER) as cluster,
        open_registries(settings, partial(read_cluster_uid, cluster)) as registries,
    ):
        # The registries first: a record of no proxy that exists afterwards belongs to a deleted proxy.
        outside, failed = await outside_entries(registries)
        seen = await _while_throttled(
            lambda: survey(
                cluster,
                outside,
                namespace=settings.namespace,
                namespaces=settings.namespaces,
                apexes=settings.dns_zones,
            )
        )
        left = found = findings(seen)
        for name, error in failed.items():
            _complain(f"the registry {name} can't be read, so nothing is said about it: {error}")
        if found and not is_json:
            sys.stdout.write(table(found))
        refused = refusal(seen, registries.installation) if is_fixing and found else None
        if refused is not None:
            _complain(f"nothing is removed: {refused}")
        elif is_fixing:
            left = tuple([each for each in found if not await _fixed(cluster, registries, each, settings.namespace)])
    if is_json:
        sys.stdout.write(as_json(seen, found, left, failed))
        return 1 if left or failed else 0
    for fixed in (each for each in found if each not in left):
        verb = "repaired" if fixed.kind is FindingKind.NEWER_RECORD else "removed"
        print(f"{verb}: {fixed.kind.value} {fixed.registry} {fixed.name}")
    for name, entries in orphans(seen).items():
        print(f"kept by deletionPolicy Orphan: {len(entries)} of tenant {name}")
    for entry in held_by_pause(seen):
        print(f"kept while paused: {entry.hostname}, of {entry.proxy}")
    for claim in resting(seen):
        print(f"rests since {claim['spec']['releasedAt']}: {claim['metadata']['name']}, of {proxy_of(claim)}")
    print(f"{len(seen.proxies)} proxies, {len(seen.entries)} records, {len(found)} findings, {len(left)} left")
    return 1 if left or failed else 0


async def _fixed(cluster: Cluster, registries: Registries, finding: Finding, namespace: str) -> bool:
    try:
        return await fix(cluster, registries, finding, namespace=namespace)
    except OperatorError as error:
        _complain(f"{finding.kind.value} {finding.name}: {error}")
        return False


def _run(parsed: argparse.Namespace) -> int:
    try:
        settings = _settings(parsed)
    except ConfigurationError as error:
        return _complain(str(error), code=2)
    configure_logging(settings.log_level, settings.log_format)
    try:
        anyio.run(app.run, settings)
    except ConfigurationError as error:
        return _complain(str(error), code=2)
    return 0


def _render(file: str, image: str, *, envoy: bool) -> int:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        documents = list(yaml.safe_load_all(text))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return _complain(f"can't read {file}: {' '.join(str(error).split())}", code=2)
    proxies = [each for each in documents if isinstance(each, dict) and each.get("kind") == ENVOY_PROXY.kind]
    if not proxies:
        return _complain(f"{file} holds no {ENVOY_PROXY.kind}", code=2)
    rendered: list[Object] = []
    for proxy in proxies:
        given = proxy.get("metadata")
        metadata: Object = {"namespace": "default", "uid": _RENDERED_UID}
        if isinstance(given, dict):
            metadata |= {name: value for name, value in given.items() if value not in (None, "")}
        for name in ("name", "namespace", "uid"):
            if not isinstance(metadata.get(name), str):
                return _complain(f"an {ENVOY_PROXY.kind} in {file} has no metadata.{name} that is text", code=2)
        try:
            spec = parse_spec(proxy)
            rendered += children(proxy | {"metadata": metadata}, spec, default_image=image).values()
        except ValidationError as error:
            return _complain(f"{metadata['name']}: {sentence(error)}", code=2)
        except TerminalError as error:
            return _complain(f"{metadata['name']}: {error}", code=2)
    if envoy:
        config_maps = [each["data"] for each in rendered if each["kind"] == CONFIG_MAP.kind]
        rendered = [{name: json.loads(text) for name, text in data.items()} for data in config_maps]
    sys.stdout.write(to_yaml(tuple(rendered)))
    return 0


def _complain(problem: str, *, code: int = 1) -> int:
    sys.stderr.write(f"operator_app: {problem}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
