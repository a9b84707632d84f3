"""The methods of the examples, which tests import as a user does who has copied the files beside a
script.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "methods"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

import fedglomo  # noqa: E402, F401
from delayed_nesterov import DelayedNesterov  # noqa: E402, F401
from dylu import Paced  # noqa: E402, F401
from eager_updates import EagerGroups, EagerUpdates, Stay  # noqa: E402, F401
from edit import ByMedian, ByNorm, ZScore  # noqa: E402, F401
from gpa import GPA  # noqa: E402, F401
from saps_psgd import FastestPairs  # noqa: E402, F401
from snoo import SNOO  # noqa: E402, F401
