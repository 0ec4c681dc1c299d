"""TLS at the client's end: whose certificates are believed, and which one is shown. For `client`, `pull`, `vllm`, the gateway.

Owns how the choices of a caller become one context, and what a failed handshake is called; and how a client's token is read,
since it comes in a file, too. Opens no connection.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from tectum.errors import StartupError

#: as in httpx: a context, the PEM file of an authority, True (the system's authorities), or False (nothing is checked)
Verify = ssl.SSLContext | str | Path | bool
#: PEM files of a certificate chain and its key
Cert = tuple[str | Path, str | Path]

#: what helps, by OpenSSL's number of what is wrong with a certificate; for all others, its authority is not known
_MEND = {
    9: "it is not valid yet, or a clock is wrong",
    10: "it has to be renewed",
    62: "call it by a name that its certificate holds",  # another host's name
    64: "call it by a name that its certificate holds",  # another address
}
_SHOW = "cert, --cert-file and --key-file"
#: what may be wrong where a server hangs up over TLS before it answers: many say nothing to a client without a certificate
HUNG_UP = f"it hung up before it answered, as it may where it wants another certificate ({_SHOW})"


def papers(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> tuple[Verify, Cert | None]:
    """`verify` and `cert` for these files, which are not opened. Raises StartupError `invalid_settings`."""
    if (cert_file is None) != (key_file is None):
        raise StartupError("invalid_settings", "cert_file and key_file go together")
    cert = None if cert_file is None or key_file is None else (cert_file, key_file)
    return True if ca_file is None else ca_file, cert


def bearer_token(token_file: Path | None) -> str | None:
    """The token to send to others: the first word of the file, None where there is no file.

    Raises StartupError `invalid_settings` for a file that cannot be read, or holds no word.
    """
    try:
        return None if token_file is None else token_file.read_text().split(maxsplit=1)[0]
    except (OSError, UnicodeDecodeError, IndexError):
        raise StartupError("invalid_settings", f"token_file: {token_file} cannot be read or is empty") from None


def client_context(url: str, verify: Verify = True, cert: Cert | None = None) -> ssl.SSLContext | None:
    """The context for `url`; None where it is http:, and there is nothing to check or to show.

    Raises StartupError `invalid_settings` for files that cannot be used, and for any of them with an http: URL.
    """
    if not url.lower().startswith("https:"):
        if cert is not None or isinstance(verify, (str, Path)):
            raise StartupError("invalid_settings", "Certificates are for an https:// URL; this one has no TLS")
        return None
    context = verify if isinstance(verify, ssl.SSLContext) else _believing(verify)
    if cert is not None:
        try:
            context.load_cert_chain(*cert)
        except OSError as error:  # ssl.SSLError is one
            raise StartupError("invalid_settings", f"cert: {_why(error)} ({cert[0]}, {cert[1]})") from None
    return context


def _believing(verify: str | Path | bool) -> ssl.SSLContext:
    if isinstance(verify, bool):
        context = ssl.create_default_context()
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context
    try:
        return ssl.create_default_context(cafile=verify)
    except OSError as error:
        raise StartupError("invalid_settings", f"verify: {_why(error)} ({verify})") from None


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def handshake_failure(error: BaseException) -> str | None:
    """What is wrong between us and the server where TLS failed, and how to mend it; None for other errors."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        mend = _MEND.get(cause.verify_code, "name its authority (verify, --ca-file)")
        return f"its certificate is not believed ({cause.verify_message.rstrip('.')}): {mend}"
    if cause is None:
        return None
    reason = (cause.reason or "no reason given").lower().replace("_", " ")
    if "alert" in reason and any(word in reason for word in ("certificate", "unknown ca", "handshake failure")):
        return f"it refused us ({reason}), as it may where it wants another certificate ({_SHOW})"
    return f"TLS failed ({reason})"
