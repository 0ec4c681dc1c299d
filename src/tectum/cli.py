"""The command line. Each command reads its flags and calls one function; heavy imports wait until they are needed.

Settings become flags by themselves: name, type, default and sentence are those of `tectum.config.Settings`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import tectum
from tectum.errors import StartupError, TectumError
from tectum.types import Embedding, Modality

app = typer.Typer(
    help="The encoder plane for multimodal serving: vision and audio encoders as a service of their own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tectum {tectum.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def with_settings(names: Iterable[str] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command a flag for each setting (or those named), passed in `settings`; None where not given."""
    from tectum.config import Settings

    fields = {name: Settings.model_fields[name] for name in (names or Settings.model_fields)}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(**arguments: Any) -> Any:
            given = {name: arguments.pop(name) for name in fields}
            return command(**arguments, settings=given)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        flags = [_flag(name, info) for name, info in fields.items()]
        wrapper.__signature__ = inspect.Signature(own + flags)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in own + flags}
        wrapper.__doc__ = command.__doc__
        wrapper.__name__ = command.__name__
        return wrapper

    return decorate


def _flag(name: str, info: Any) -> inspect.Parameter:
    from typing import Literal, Optional, get_args, get_origin

    plain = info.annotation
    if get_origin(plain) is Literal:
        plain = str
    choices = f" [{'|'.join(get_args(info.annotation))}]" if get_origin(info.annotation) is Literal else ""
    inner = [kind for kind in get_args(plain) if kind is not type(None)]
    kind = str if str in inner else inner[0] if inner else plain
    default = (
        "" if info.default is None else f" [default: {str(info.default).lower() if kind is bool else info.default}]"
    )
    flag = f"--{name.replace('_', '-')}"
    declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    said = escape(f"{info.description}{choices}{default}")  # brackets would be read as markup, and vanish
    option = typer.Option(declared, help=said, show_default=False)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[kind], option],  # noqa: UP045
    )


Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file with settings; flags and TECTUM_* go before it.")
]


@app.command()
@with_settings()
def serve(
    model: Annotated[str, typer.Argument(help="A local folder or a hub id.")],
    config: Config = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Serve the encoder of MODEL over HTTP (only the encoder is loaded, never the language model).

    Ends on SIGTERM or Ctrl-C: new work is refused with 503, accepted work is finished within --drain-timeout.
    """
    from tectum.config import Settings

    loaded = Settings.load(config, **(settings or {}))
    run = _needs_serve("tectum.serving.server", "serve")
    raise typer.Exit(run(model, loaded))


@app.command()
def bootstrap(
    host: Annotated[
        str, typer.Option(help="Address to listen on; anything but loopback needs --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 takes a free one and prints it.")] = 8997,
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the bearer token of encoders and readers.")
    ] = None,
    lease: Annotated[float, typer.Option(min=1, help="Seconds that an encoder is kept without a sign of life.")] = 30.0,
    probe_interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two health probes of an encoder.")
    ] = 5.0,
) -> None:
    """Keep the list of encoders, for language servers that ask for it: SGLang's three calls, with leases and health."""
    run = _needs_serve("tectum.serving.discovery", "serve_bootstrap")
    raise typer.Exit(run(host, port, token_file, lease, probe_interval))


@app.command()
def gateway(
    encoders: Annotated[
        list[str], typer.Option(help="An encoder's http://host:port; give it several times for several.")
    ],
    engine: Annotated[str, typer.Option(help="The engine's http://host:port: a vLLM with tectum.engines.vllm.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anything but loopback needs --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 takes a free one.")] = 30200,
    token_file: Annotated[Path | None, typer.Option(help="File with the bearer token callers must send.")] = None,
    encoder_token_file: Annotated[Path | None, typer.Option(help="File with the encoders' bearer token.")] = None,
    engine_token_file: Annotated[
        Path | None, typer.Option(help="File with the engine's bearer token; without it the caller's own passes on.")
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(help="PEM file of the authority of the encoders' and the engine's certificates (https)."),
    ] = None,
    cert_file: Annotated[
        Path | None, typer.Option(help="PEM file of your own certificate, for mutual TLS with them.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Largest request body (bytes).")] = 64 * 1024 * 1024,
    encode_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that an encoder may take.")] = 120.0,
) -> None:
    """Put encoders before an engine: OpenAI chat requests in, their pictures encoded, all else passed through."""
    arguments = {name: value for name, value in locals().items() if name != "encoders"}
    settings = _needs_serve("tectum.serving.gateway", "GatewaySettings")(encoders=tuple(encoders), **arguments)
    raise typer.Exit(_needs_serve("tectum.serving.gateway", "run")(settings))


@app.command()
@with_settings(
    ["device", "dtype", "compile", "forward_threads", "allow_private_urls", "fetch_timeout", "max_image_pixels"]
)
def encode(
    files: Annotated[list[str], typer.Argument(metavar="FILE_OR_URL…", help="Items: files, http(s) or data URLs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the rows (safetensors).")],
    url: Annotated[str | None, typer.Option(help="A running server; without it the encoder runs here.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id, where the encoder runs here.")] = None,
    modality: Annotated[Modality, typer.Option(help="What the items are, all of them.")] = Modality.IMAGE,
    token_file: Annotated[Path | None, typer.Option(help="File that holds the server's bearer token.")] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="PEM file of the authority of the server's certificate (https).")
    ] = None,
    cert_file: Annotated[Path | None, typer.Option(help="PEM file of your own certificate, for mutual TLS.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    min_pixels: Annotated[int | None, typer.Option(help="Processor option: upscale below this many pixels.")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="Processor option: downscale above this many pixels.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.")] = 120.0,
    settings: dict[str, Any] | None = None,
) -> None:
    """Encode pictures, clips or recordings and write their rows, in order, to one safetensors file."""
    given = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    options = {name: value for name, value in given.items() if value is not None}
    asked: dict[str, Any] = {"options": options, "modality": modality}
    if (url is None) == (model is None):
        text = "Give either --url (a running server) or --model (encode in this process)"
        raise StartupError("invalid_settings", text)
    if not out.parent.is_dir():  # said before the work, not after it
        raise StartupError("invalid_settings", f"out: there is no folder {out.parent}")
    if url is not None:
        from tectum.engines.tls import bearer_token, papers

        verify, cert = papers(ca_file, cert_file, key_file)
        options_there = {
            "token": bearer_token(token_file),
            "timeout": timeout,
            "verify": verify,
            "cert": cert,
        }
        embedding = _encode_there(url, files, asked, **options_there)
    else:
        _needs_serve("tectum.models.load", "load_adapter")  # an Encoder imports it when it is made
        encoder = _needs_serve("tectum.pipeline.encoder", "Encoder")
        with encoder(model, **{name: value for name, value in (settings or {}).items() if value is not None}) as here:
            embedding = here.encode(files, **asked)
    _write(embedding, out)
    Console(stderr=True).print(
        f"{len(files)} item(s), {sum(embedding.item_rows)} rows of {embedding.width} {embedding.dtype} -> {out}",
        highlight=False,
    )


def _encode_there(url: str, files: list[str], asked: dict[str, Any], **options: Any) -> Any:
    from tectum.engines.client import Client

    with Client(url, **options) as client:
        return client.encode(files, **asked)


def _write(embedding: Embedding, out: Path) -> None:
    """The embedding in the wire format. Raises StartupError `invalid_settings` where it cannot be written."""
    from tectum.delivery import wire

    packed = wire.pack(
        rows=embedding.rows,
        item_rows=embedding.item_rows,
        grid_thw=embedding.grid_thw,
        deepstack=embedding.deepstack,
        dtype=embedding.dtype,
        req_id=embedding.req_id,
        items=embedding.items,
    )
    try:
        out.write_bytes(packed)
    except OSError as error:
        raise StartupError("invalid_settings", f"out: {out}: {error.strerror}") from None


@app.command()
def bench(
    url: Annotated[str, typer.Argument(help="A running server, such as http://127.0.0.1:30100.")],
    clients: Annotated[
        int, typer.Option(min=1, help="Closed loop: callers that send when they have their answer.")
    ] = 8,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Open loop instead: requests a second, at random moments.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to send.")] = 10.0,
    size: Annotated[
        list[str] | None, typer.Option(help="WIDTHxHEIGHT of pictures, with :WEIGHT for a mix; may be given often.")
    ] = None,
    slow_share: Annotated[float, typer.Option(min=0, max=1, help="Share of requests by URL, to a slow server.")] = 0.0,
    slow_seconds: Annotated[float, typer.Option(min=0, help="Seconds that the slow server takes.")] = 2.0,
    repeat_share: Annotated[float, typer.Option(min=0, max=1, help="Share of pictures that were sent before.")] = 0.0,
    cancel_share: Annotated[float, typer.Option(min=0, max=1, help="Share of callers that hang up early.")] = 0.0,
    cancel_within: Annotated[float, typer.Option(min=0, help="Seconds within which those hang up.")] = 0.1,
    processes: Annotated[int, typer.Option(min=1, help="Processes that send.")] = 1,
    protocol: Annotated[
        str, typer.Option(help="What to speak: native, or sglang (its doors; rows come here over ZeroMQ).")
    ] = "native",
    probe: Annotated[
        float | None, typer.Option(min=0.001, help="Ask for health and releases every so many seconds, too.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds the server's bearer token.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which an answer is given up.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, max=10**6, help="The same seed draws the same load.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Put a load on a running server, from processes of its own, and say how it held.

    Pictures are made here (which takes Pillow); each is different unless it repeats.
    """
    from tectum.bench import plan, report, run
    from tectum.bench.protocols import PROTOCOLS
    from tectum.engines.tls import bearer_token

    if protocol not in PROTOCOLS:
        raise StartupError("invalid_settings", f"protocol: {protocol[:40]!r} is none of {', '.join(PROTOCOLS)}")
    load = plan.Plan(
        url,
        seconds=seconds,
        clients=clients,
        rate=rate,
        sizes=tuple(plan.Size.parse(text) for text in size or ["224x224"]),
        slow_share=slow_share,
        repeat_share=repeat_share,
        cancel_share=cancel_share,
        cancel_within=cancel_within,
        protocol=protocol,
        timeout=timeout,
        token=bearer_token(token_file),
        seed=seed,
    )
    with report.progress(Console(stderr=True), seconds) as tell:
        result = run.measure(load, processes=processes, slow_seconds=slow_seconds, probe=probe, tell=tell)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        report.show(Console(), result)


#: `tectum demo --engine NAME`: the module whose `run` drives it
DEMO_ENGINES = {"sglang": "tectum.demo.engines.sglang", "vllm": "tectum.demo.engines.vllm"}


@app.command()
def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the pictures.")] = False,
    swap: Annotated[bool, typer.Option(help="Swap the rows of two pictures on purpose: the answer swaps.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the drawn scenes.")] = 2,
    engine: Annotated[str | None, typer.Option(help="Answer through a real engine: vllm or sglang.")] = None,
    engine_python: Annotated[Path | None, typer.Option(help="The Python of the environment with that engine.")] = None,
) -> None:
    """Answer questions about drawn pictures from rows that another process encoded, and compare with one process.

    Then the same with photographs: rows and logits must be equal to the bit.
    """
    if engine is not None:
        if engine not in DEMO_ENGINES:
            raise StartupError("invalid_settings", f"engine: {engine[:40]!r} is not known; give vllm or sglang")
        run = _needs_serve(DEMO_ENGINES[engine], "run")
        raise typer.Exit(run(json_output=as_json, swap=swap, seed=seed, python=engine_python))
    raise typer.Exit(_needs_serve("tectum.demo.run", "run_demo")(json_output=as_json, swap=swap, seed=seed))


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="A model folder or hub id to check.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is installed, which device and dtype would be used, and whether MODEL is supported."""
    from tectum.doctor import examine

    raise typer.Exit(examine(model, as_json))


@app.command()
def explain(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="CODE_OR_TEXT", help="A code, or a pasted message.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List every code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what an error means and what to do about it; a pasted message or log line finds its entry."""
    from tectum import catalogue

    if listed or not words:
        found = catalogue.entries()
    else:
        found = catalogue.find(" ".join(words))[:1]
    if not found:
        raise StartupError("invalid_settings", "No error matches that; tectum explain --list shows all codes")
    if as_json:
        typer.echo(json.dumps([catalogue.to_json(entry) for entry in found]))
    elif listed or not words:
        for entry in found:
            typer.echo(f"{entry.code:24} {entry.meaning}"[:118])
    else:
        typer.echo(catalogue.to_text(found[0], color=sys.stdout.isatty()))


def _needs_serve(module: str, name: str) -> Any:
    """Import what only `tectum[serve]` brings. Raises StartupError `missing_dependency` that says how to get it."""
    from importlib import import_module

    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tectum"):
            raise
        text = f'{error.name} is not installed; run: pip install "tectum[serve]"'
        raise StartupError("missing_dependency", text) from None
    except ImportError as error:
        if (error.name or "").startswith("tectum"):
            raise
        also = " python-multipart" if error.name == "multipart" else ""  # its older versions came under that name
        text = (
            f'{error.name} is too old, or hidden by another package; run: pip install --upgrade "tectum[serve]"{also}'
        )
        raise StartupError("missing_dependency", text) from None


def main() -> None:
    """Run the command line: exit code 2 for what cannot start, 1 for what failed."""
    try:
        app()
    except TectumError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": error.to_problem()}))
        text = escape(str(error))
        more = "" if "explain" in sys.argv[1:2] else f"\n[dim]what to do: tectum explain {error.code}[/]"
        Console(stderr=True).print(f"[bold red]error[/] {text}{more}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, StartupError) else 1)
