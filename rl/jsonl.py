"""JSON Lines files of the user's: objects by line, and what is wrong with a line by its number."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from typing import Any

from kernels.base.options import UserError


def read(path: str | os.PathLike[str], flag: str) -> Iterator[tuple[str, Any]]:
  """The values of a file's lines, blank lines passed over.

  Lines end at a line feed alone: a JSON text may hold U+2028 and other ends of lines as they are.
  A byte order mark is passed over.

  Args:
    path: The file, in UTF-8.
    flag: Name of the flag that gave it, without dashes.

  Yields:
    What messages call the line ("FILE line N"), and its value.

  Raises:
    UserError: There is no such file, it cannot be read, or a line is no JSON.
  """
  require_file(path, flag)
  try:
    file = open(path, "rb")
  except OSError as error:
    raise UserError(f"--{flag}={path}: cannot be read: {error.strerror}") from None
  with file:
    for number, data in enumerate(file, 1):
      if number == 1:
        data = data.removeprefix(codecs.BOM_UTF8)
      if not data.strip():
        continue
      name = f"{os.fspath(path)} line {number}"
      try:
        value = json.loads(data.decode("utf-8").rstrip("\r\n"))
      except UnicodeDecodeError as error:
        raise UserError(f"{name} is no UTF-8 text (byte {error.start + 1} of the line)") from None
      except json.JSONDecodeError as error:
        # Some of the parser's messages end in "at", since it goes on with the place itself.
        message = error.msg.removesuffix(" at")
        raise UserError(f"{name} is no JSON: {message} at column {error.colno}") from None
      except (ValueError, RecursionError) as error:  # A number too long, brackets too deep.
        raise UserError(f"{name} is no JSON that can be read: {error}") from None
      if b"\\ud" in data.lower() and _has_half_a_pair(value):
        raise UserError(f"{name} holds half of a surrogate pair (\\ud800 to \\udfff): no text")
      yield name, value


def _has_half_a_pair(value: Any) -> bool:
  try:
    json.dumps(value, ensure_ascii=False).encode("utf-8")
  except UnicodeEncodeError:
    return True
  return False


def require_file(path: str | os.PathLike[str], flag: str) -> None:
  """Checks that a flag names a file.

  Raises:
    UserError: It names nothing, or a directory.
  """
  if not os.path.exists(path):
    raise UserError(f"--{flag}={os.fspath(path)}: no such file")
  if os.path.isdir(path):
    raise UserError(f"--{flag}={os.fspath(path)}: is a directory; give a file")
