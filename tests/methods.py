"""The methods of the examples, which tests import as a user does who has copied the files beside a script."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "methods"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

from delayed_nesterov import DelayedNesterov as DelayedNesterov  # noqa: E402
from dylu import Paced as Paced  # noqa: E402
from eager_updates import EagerGroups as EagerGroups  # noqa: E402
from eager_updates import EagerUpdates as EagerUpdates  # noqa: E402
from eager_updates import Stay as Stay  # noqa: E402
from edit import ByMedian as ByMedian  # noqa: E402
from edit import ByNorm as ByNorm  # noqa: E402
from edit import ZScore as ZScore  # noqa: E402
