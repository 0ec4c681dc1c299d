"""What a caller may send to `POST /v1/encode`, as JSON or as multipart, and how it becomes an `EncodeRequest`."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.datastructures import UploadFile
from starlette.requests import Request

from tectum.config import MIB, Settings
from tectum.errors import BadRequestError
from tectum.types import EncodeRequest, MediaItem, Modality

#: an id stands in URLs, logs and error frames: plain characters only
REQ_ID = r"^[A-Za-z0-9_][A-Za-z0-9._:@+=~-]*$"
ReqId = Annotated[str, Field(min_length=1, max_length=256, pattern=REQ_ID)]


class ItemBody(BaseModel):
    """One picture: exactly one of `url` (https:, http:, data:, file:), `data` (base64) or `file` (a multipart part)."""

    model_config = ConfigDict(extra="forbid")

    type: Modality
    url: str | None = Field(None, min_length=1, description="Where the media lies, or a data: URI.")
    data: str | None = Field(None, description="The media itself, base64.")
    file: str | None = Field(None, max_length=256, description="Name of the multipart part that holds the raw bytes.")

    @model_validator(mode="after")
    def _one_source(self) -> ItemBody:
        if sum(source is not None for source in (self.url, self.data, self.file)) != 1:
            raise ValueError("exactly one of url, data and file must be given")
        return self


class DeliveryBody(BaseModel):
    """How the rows reach the caller: in this answer (`inline`), or held for `GET /v1/requests/{id}/embedding`."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["inline", "hold"] = "inline"


class EncodeBody(BaseModel):
    """One part of one request: items of one modality, encoded together."""

    model_config = ConfigDict(extra="forbid")

    req_id: ReqId | None = Field(None, description="Identity of the request; made up where it is not given.")
    items: list[ItemBody] = Field(min_length=1, max_length=10_000, fail_fast=True)
    num_parts: int = Field(1, ge=1, le=4096, strict=True)
    part_idx: int = Field(0, ge=0, strict=True)
    deadline_ms: int | None = Field(
        None, ge=1, le=3_600_000, strict=True, description="Milliseconds until it is no use."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Processor options, such as max_pixels.")
    delivery: DeliveryBody = Field(default_factory=DeliveryBody)
    tenant: str = Field("", max_length=256, description="On whose behalf; rows are never shared between tenants.")
    content_keys: bool = Field(False, description="Whether the metadata names the content of each item by its key.")

    @model_validator(mode="after")
    def _part_in_range(self) -> EncodeBody:
        if self.part_idx >= self.num_parts:
            raise ValueError("part_idx must be below num_parts")
        return self

    def to_request(self, files: dict[str, bytes], settings: Settings) -> EncodeRequest:
        """Raises BadRequestError `request_too_large` (items), `mixed_modalities` or `invalid_request` (no such part)."""
        if len(self.items) > settings.max_items:
            text = f"The request has {len(self.items)} items, more than --max-items {settings.max_items}"
            raise BadRequestError("request_too_large", text)
        kinds = {item.type for item in self.items}
        if len(kinds) > 1:
            text = f"A request holds one modality, this one has {', '.join(sorted(kinds))}: send one request for each"
            raise BadRequestError("mixed_modalities", text)
        return EncodeRequest(
            req_id=self.req_id or uuid.uuid4().hex,
            items=tuple(_media_item(index, item, files) for index, item in enumerate(self.items)),
            num_parts=self.num_parts,
            part_idx=self.part_idx,
            deadline_ms=self.deadline_ms,
            options=self.options,
            delivery=self.delivery.mode,
            tenant=self.tenant,
            content_keys=self.content_keys,
        )


def _media_item(index: int, item: ItemBody, files: dict[str, bytes]) -> MediaItem:
    if item.file is None:
        return MediaItem(item.type, url=item.url, base64=item.data)
    if item.file not in files:
        raise BadRequestError("invalid_request", f"items.{index}.file names no part of this multipart body", item=index)
    return MediaItem(item.type, data=files[item.file])


async def read_encode_request(request: Request, settings: Settings) -> EncodeRequest:
    """The encode request in an HTTP body: JSON, or multipart with a `request` field (the JSON) and file parts.

    Raises BadRequestError (a field, the form, or the size is wrong) or pydantic's ValidationError.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return EncodeBody.model_validate_json(await request.body()).to_request({}, settings)
    # the body as a whole is capped before it gets here, so that the form needs only a bound on its parts
    async with request.form(max_files=settings.max_items, max_fields=4, max_part_size=8 * MIB) as form:
        described = form.get("request")
        if not isinstance(described, str):
            raise BadRequestError(
                "invalid_request", "The multipart body needs a field named request that holds the JSON"
            )
        body = EncodeBody.model_validate_json(described)
        files = {name: await part.read() for name, part in form.multi_items() if isinstance(part, UploadFile)}
        return body.to_request(files, settings)
