"""Pages of the site that are made from the code when it is built, so that none can be out of date.

Read by mkdocs (`hooks:` in mkdocs.yml). `pages()` is also what the tests look at.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from tectum.config import Settings


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the generated pages to the site."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Path below `docs/` and Markdown of each generated page."""
    return {
        "reference/cli.md": _command_line(),
        "reference/settings.md": _settings(),
        "reference/http.md": _http(),
        "reference/metrics.md": _metrics(),
    }


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _command_line() -> str:
    import typer.main

    from tectum.cli import app

    parts = ["# Command line\n\nGenerated from the commands themselves; `tectum COMMAND --help` prints the same.\n"]
    for name, command in sorted(typer.main.get_command(app).commands.items()):  # type: ignore[attr-defined]
        settings = [p for p in command.params if p.name in Settings.model_fields]
        own = [p for p in command.params if p not in settings and p.name != "help"]
        parts.append(f"## tectum {name}\n\n{inspect.cleandoc(command.help or '')}\n")
        rows = ((f"`{_name(p)}`", str(getattr(p, "help", None) or "")) for p in own)
        if own:
            parts.append(_table(("argument or flag", "meaning"), rows))
        if settings:
            flags = "every setting" if len(settings) == len(Settings.model_fields) else _listed(settings)
            parts.append(f"Also takes as a flag: {flags} ([settings](settings.md)).\n")
    return "\n".join(parts)


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return ", ".join([*parameter.opts, *parameter.secondary_opts])
    return str(parameter.metavar or parameter.name).upper()


def _listed(parameters: list[Any]) -> str:
    return ", ".join(f"`{parameter.opts[0]}`" for parameter in parameters)


def _settings() -> str:
    head = (
        "# Settings\n\nGenerated from `tectum.config.Settings`. A flag goes before its `TECTUM_…` environment variable, that "
        "before the file given with `--config` (TOML, the names of the first column). Unknown names are refused.\n\n"
    )
    rows = (
        (f"`{name}`", f"`--{name.replace('_', '-')}`", f"`{_default(info.default)}`", str(info.description))
        for name, info in Settings.model_fields.items()
    )
    return head + _table(("setting", "flag", "default", "meaning"), rows)


def _default(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _service() -> tuple[Any, Any]:
    """The application as `tectum serve` builds it, and its metrics; nothing is started and no model is loaded."""
    from tectum.delivery.base import deliveries
    from tectum.observe.metrics import Metrics
    from tectum.pipeline.batcher import Batcher
    from tectum.pipeline.limits import lifecycle_limits
    from tectum.pipeline.pipeline import Pipeline
    from tectum.pipeline.stages import Stages
    from tectum.serving.app import create_app
    from tectum.serving.dashboard import Recent
    from tectum.serving.health import Health
    from tectum.serving.push import Pushes
    from tectum.serving.sglang import Doors
    from tectum.workers.pool import WorkerPool

    settings, metrics = Settings(), Metrics()
    pool, sending = WorkerPool("model", settings), deliveries(settings)
    stages = Stages(pool, settings, sending)
    pipeline = Pipeline(stages, lifecycle_limits(settings), [Batcher(fuse=False, batch_patches=1)])
    pushes = Pushes(pipeline, sending, settings)
    metrics.watch(pipeline.ledger, pool)
    app = create_app(
        pipeline,
        pool,
        settings,
        metrics,
        pushes,
        Doors(pipeline, sending, pushes, settings),
        Health(pipeline, pool, settings),
        Recent(),
    )
    stages.pool.close()
    return app, metrics


def _http() -> str:
    app, _ = _service()
    document = app.openapi()
    head = (
        "# HTTP\n\nGenerated from the routes. A running server shows the same, with schemas, at `/docs`. Every failure is "
        "`application/problem+json` with a `code` of the [error catalogue](../errors/README.md).\n\n"
    )
    rows = (
        (f"`{method.upper()} {path}`", operation.get("summary", ""), operation.get("description", "").split("\n\n")[0])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    body = document["components"]["schemas"]["EncodeBody"]["properties"]
    fields = ((f"`{name}`", _type(schema), schema.get("description", "")) for name, schema in body.items())
    return (
        head
        + _table(("call", "what it does", "more"), rows)
        + "\n## Body of `POST /v1/encode`\n\n"
        + _table(("field", "type", "meaning"), fields)
    )


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    kinds = [_type(part) for part in schema.get("anyOf", [])]
    return " or ".join(kinds) or str(schema.get("type", ""))


def _metrics() -> str:
    _, metrics = _service()
    head = "# Metrics\n\nGenerated from the registry behind `GET /metrics` (Prometheus text).\n\n"
    rows = (
        (f"`{family.name}{'_total' if family.type == 'counter' else ''}`", family.type, family.documentation)
        for family in metrics.registry.collect()
    )
    return head + _table(("metric", "type", "meaning"), rows)
