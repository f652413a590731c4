"""Makes the clients: options to obstore's stores. Does no I/O but to read credential and certificate files."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

from obstore.store import AzureStore, GCSStore, S3Store

from l2kit.errors import ConfigError, L2Error
from l2kit_s3.config import AzConfig, BucketConfig, GsConfig, S3Config
from l2kit_s3.credentials import GivenCredentials, ProfileCredentials

Store = S3Store | GCSStore | AzureStore

_FIRST_PAUSE: Final = timedelta(milliseconds=100)


def build_store(config: BucketConfig) -> Store:
    """A new client, with credentials as they are now.

    Raises:
        ConfigError: the client does not take an option.
        AuthError: a profile was asked for and is not there.
    """
    http = {"client_options": _client_options(config), "retry_config": _retries(config)}
    try:
        match config:
            case S3Config():
                return S3Store(config.bucket, **_s3_options(config), **http)
            case GsConfig():
                return GCSStore(config.bucket, **_gs_options(config), **http)
            case AzConfig():
                return AzureStore(config.bucket, **_az_options(config), **http)
    except L2Error:
        raise
    except Exception as error:  # of the client's many kinds; its text may quote what it was given
        raise ConfigError(f"{config.where}: the client does not take these options ({type(error).__name__})") from None
    raise AssertionError(config)


def s3_endpoint(config: S3Config) -> str:
    """Where requests go, with the bucket in the host name if it stands there."""
    endpoint = config.endpoint
    if endpoint is None:
        region = _s3_region(config)
        endpoint = f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    scheme, _, host = endpoint.rstrip("/").partition("://")
    return f"{scheme}://{config.bucket}.{host}" if config.virtual else f"{scheme}://{host}"


def _s3_region(config: S3Config) -> str:
    named = config.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return named or "us-east-1"


def _client_options(config: BucketConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "allow_http": not config.tls,
        "connect_timeout": timedelta(seconds=config.connect_limit_s),
        "read_timeout": timedelta(seconds=config.socket_limit_s),
        "timeout": timedelta(seconds=config.timeout_s),
        "pool_idle_timeout": timedelta(seconds=20),
    }
    if not config.verify:
        options["allow_invalid_certificates"] = True
    authorities = config.read_ca_file()
    if authorities is not None:
        options["root_certificate"] = authorities
    return options


def _retries(config: BucketConfig) -> Any:
    backoff = {"init_backoff": _FIRST_PAUSE, "max_backoff": timedelta(seconds=1), "base": 2}
    return {
        "max_retries": config.retries,
        "retry_timeout": timedelta(seconds=config.timeout_s),
        "backoff": backoff,
    }


def _s3_options(config: S3Config) -> dict[str, Any]:
    endpoint = s3_endpoint(config)
    options: dict[str, Any] = {
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,  # wins over the other, and could come from the environment
        "region": _s3_region(config),
        "virtual_hosted_style_request": config.virtual,
        "unsigned_payload": not config.signs_payload,
    }
    if config.anonymous:
        options["skip_signature"] = True
    elif config.access_key_id is not None and config.secret_access_key is not None:
        options["credential_provider"] = GivenCredentials(
            config.access_key_id, config.secret_access_key, config.session_token
        )
    else:
        profile = ProfileCredentials.find(config.credentials_file, config.profile)
        if profile is not None:
            profile()  # what is wrong with it is said now, and by us
            options["credential_provider"] = profile
    return options


def _gs_options(config: GsConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if config.service_account_file is not None:
        options["service_account"] = config.service_account_file
    if config.anonymous:
        options["skip_signature"] = True
    if config.endpoint is not None:
        options["base_url"] = config.endpoint
    return options


def _az_options(config: AzConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if config.account is not None:
        options["account_name"] = config.account
    if config.account_key is not None:
        options["account_key"] = config.account_key.reveal()
    if config.sas_token is not None:
        options["sas_key"] = config.sas_token.reveal()
    if config.anonymous:
        options["skip_signature"] = True
    if config.endpoint is not None:
        options["endpoint"] = config.endpoint
    return options
