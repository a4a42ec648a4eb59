"""Tables of results as pandas DataFrames. pandas is optional: nothing else here needs it."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from trefoil.core.errors import StartError


def data_frame(columns: Mapping[str, Any], index: str = "") -> Any:
    """pandas DataFrame of columns of one length; `index` names the column that becomes its index.

    Raises:
        StartError: pandas is not installed.
    """
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise StartError(
            "pandas is not installed", remedy="pip install pandas, or read what `to_json` gives"
        ) from error
    made = pandas.DataFrame(dict(columns))
    return made.set_index(index) if index else made
