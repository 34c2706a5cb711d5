"""Changes that make a valid file of profiles or tuned knobs wrong, and the reader's message.

The valid files are those of ``file_formats``.
"""

# Format, text of the valid file, what stands there instead (once), the whole message.
WRONG_LINES: list[tuple[str, str, str, str]] = [
    (
        "profiles",
        '"us": 12.5',
        '"us": "12.5"',
        "{path}:1 must be a line of profiles: us ('12.5') must be of type float",
    ),
    (
        "profiles",
        '"us": 12.5',
        '"us": true',
        "{path}:1 must be a line of profiles: us (True) must be of type float",
    ),
    (
        "profiles",
        '"us": 12.5',
        '"us": -1',
        "{path}:1 must be a line of profiles: us (-1.0) must be at least 0",
    ),
    (
        "profiles",
        '"us": 12.5',
        '"us": null',
        "{path}:1 must be a line of profiles: us (None) must be of type float",
    ),
    (
        "profiles",
        '"us": 12.5',
        '"us": 1e400',
        ("{path}:1 must be a line of profiles: it must be JSON: '1e400' is not a finite number"),
    ),
    ("profiles", '"us": 12.5, ', "", "{path}:1 must be a line of profiles: us is required"),
    (
        "profiles",
        '"op": "mm"',
        '"op": 3',
        "{path}:1 must be a line of profiles: op (3) must be of type str",
    ),
    (
        "profiles",
        '"op": "mm"',
        '"op": "mm", "op": "mm"',
        ("{path}:1 must be a line of profiles: it must be JSON: an object has the key 'op' twice"),
    ),
    (
        "profiles",
        '"op": "mm"',
        '"op": "mm", "file": "x"',
        ("{path}:1 must be a line of profiles: key (file) must be one of op, us, environment"),
    ),
    (
        "profiles",
        '"op": "mm", ',
        "",
        (
            "{path}:1 must be a line of profiles: key (us) must be one of collective, "
            "points, environment"
        ),
    ),
    (
        "profiles",
        '"device": "cpu", ',
        "",
        "{path}:1 must be a line of profiles: environment.device is required",
    ),
    (
        "profiles",
        '"device": "cpu"',
        '"device": 0',
        ("{path}:1 must be a line of profiles: environment.device (0) must be of type str"),
    ),
    (
        "profiles",
        '"device": "cpu"',
        '"device": "cpu", "host": "a"',
        (
            "{path}:1 must be a line of profiles: key (environment.host) must be one of "
            "environment.device, environment.versions, environment.topology"
        ),
    ),
    (
        "profiles",
        '{"op": "mm"',
        '[]\n{"op": "mm"',
        "{path}:1 must be a line of profiles: value ([]) must be a table",
    ),
    (
        "profiles",
        '{"op": "mm"',
        '\n{"op": "mm"',
        (
            "{path}:1 must be a line of profiles: it must be JSON: Expecting value: line 1 "
            "column 1 (char 0)"
        ),
    ),
    (
        "profiles",
        '"points": [[1000, 10.0]',
        '"points": [[1000, "10"]',
        "{path}:2 must be a line of profiles: points[0][1] ('10') must be of type float",
    ),
    (
        "profiles",
        "[1000, 10.0]",
        "[1000]",
        "{path}:2 must be a line of profiles: points[0] ([1000]) must have 2 items",
    ),
    (
        "profiles",
        "[1000, 10.0]",
        "[1000, 10.0, 1]",
        ("{path}:2 must be a line of profiles: points[0] ([1000, 10.0, 1]) must have 2 items"),
    ),
    (
        "profiles",
        "[1000, 10.0]",
        "[1000.5, 10.0]",
        "{path}:2 must be a line of profiles: points[0][0] (1000.5) must be of type int",
    ),
    (
        "profiles",
        "[1000, 10.0]",
        "[-1, 10.0]",
        (
            "{path}:2 must be a line of profiles: points' bytes ([-1, 4000]) must be "
            "positive, distinct and ascending"
        ),
    ),
    (
        "profiles",
        "[1000, 10.0]",
        "[5000, 10.0]",
        (
            "{path}:2 must be a line of profiles: points' bytes ([5000, 4000]) must be "
            "positive, distinct and ascending"
        ),
    ),
    (
        "profiles",
        "[1000, 10.0]",
        "[1000, 0]",
        ("{path}:2 must be a line of profiles: points' microseconds (0.0) must be above 0"),
    ),
    (
        "profiles",
        "[[1000, 10.0], [4000, 20.0]]",
        "[]",
        (
            "{path}:2 must be a line of profiles: points' bytes ([]) must be positive, "
            "distinct and ascending"
        ),
    ),
    (
        "profiles",
        "[[1000, 10.0], [4000, 20.0]]",
        "{}",
        "{path}:2 must be a line of profiles: points ({}) must be a list",
    ),
    (
        "profiles",
        '"collective": "all_to_all"',
        '"collective": null',
        "{path}:2 must be a line of profiles: collective (None) must be of type str",
    ),
    (
        "profiles",
        '"compute": 1.5',
        '"compute": 0.5',
        "{path}:3 must be a line of profiles: compute (0.5) must be at least 1",
    ),
    (
        "profiles",
        '"sm_margin": 0',
        '"sm_margin": -1',
        "{path}:3 must be a line of profiles: sm_margin (-1) must be at least 0",
    ),
    (
        "profiles",
        '"sm_margin": 0',
        '"sm_margin": 0.5',
        ("{path}:3 must be a line of profiles: contention.sm_margin (0.5) must be of type int"),
    ),
    (
        "profiles",
        '"sm_margin": 0',
        '"margin": 0',
        (
            "{path}:3 must be a line of profiles: key (contention.margin) must be one of "
            "contention.compute, contention.comm, contention.sm_margin, "
            "contention.grouped_sm_margin, did you mean contention.sm_margin"
        ),
    ),
    (
        "profiles",
        '"contention": {',
        '"contention": [], "x": {',
        ("{path}:3 must be a line of profiles: key (x) must be one of contention, environment"),
    ),
    (
        "tuned knobs",
        '"version": 1',
        '"version": 1, "version": 1',
        (
            "{path}:1 must be a line of tuned knobs: it must be JSON: an object has the "
            "key 'version' twice"
        ),
    ),
    (
        "tuned knobs",
        '"version": 1, ',
        "",
        "{path}:1 must be a line of tuned knobs: version is required",
    ),
    (
        "tuned knobs",
        '"device": "cpu"',
        '"device": null',
        ("{path}:1 must be a line of tuned knobs: environment: device (None) must be of type str"),
    ),
    (
        "tuned knobs",
        '"environment"',
        '"machine"',
        "{path}:1 must be a line of tuned knobs: environment is required",
    ),
    (
        "tuned knobs",
        '"hidden_size": 64',
        '"hidden_size": "64"',
        ("{path}:1 must be a line of tuned knobs: shape.hidden_size ('64') must be of type int"),
    ),
    (
        "tuned knobs",
        '"hidden_size": 64',
        '"hidden_size": 0',
        "{path}:1 must be a line of tuned knobs: hidden_size (0) must be at least 1",
    ),
    (
        "tuned knobs",
        '"hidden_size": 64',
        '"hidden_size": true',
        ("{path}:1 must be a line of tuned knobs: shape.hidden_size (True) must be of type int"),
    ),
    (
        "tuned knobs",
        '"top_k": 2, ',
        "",
        "{path}:1 must be a line of tuned knobs: shape.top_k is required",
    ),
    (
        "tuned knobs",
        '"dtype": "bfloat16"',
        '"dtype": 16',
        "{path}:1 must be a line of tuned knobs: shape.dtype (16) must be of type str",
    ),
    (
        "tuned knobs",
        '"num_tokens": 512',
        '"num_tokens": -1',
        "{path}:1 must be a line of tuned knobs: num_tokens (-1) must be at least 0",
    ),
    (
        "tuned knobs",
        '"num_tokens": 512',
        '"num_tokens": 512.5',
        ("{path}:1 must be a line of tuned knobs: shape.num_tokens (512.5) must be of type int"),
    ),
    (
        "tuned knobs",
        '"settings": ["home_rows=16", "up.run=2"]',
        '"settings": "home_rows=16"',
        ("{path}:1 must be a line of tuned knobs: settings ('home_rows=16') must be a list"),
    ),
    (
        "tuned knobs",
        '"home_rows=16"',
        '"nothere=16"',
        (
            "{path}:1 must be a line of tuned knobs: setting (nothere=16) must be the name "
            "of a knob, an equals sign and an integer"
        ),
    ),
    (
        "tuned knobs",
        '"home_rows=16"',
        '"home_rows=-1"',
        (
            "{path}:1 must be a line of tuned knobs: setting (home_rows=-1) must be the "
            "name of a knob, an equals sign and an integer"
        ),
    ),
    (
        "tuned knobs",
        '"home_rows=16"',
        "16",
        "{path}:1 must be a line of tuned knobs: settings[0] (16) must be of type str",
    ),
    (
        "tuned knobs",
        '"home_rows=16"',
        '"a\\nb"',
        (
            "{path}:1 must be a line of tuned knobs: setting ('a\\nb') must be the name of "
            "a knob, an equals sign and an integer"
        ),
    ),
    (
        "tuned knobs",
        '"settings"',
        '"setting"',
        (
            "{path}:1 must be a line of tuned knobs: key (setting) must be one of shape, "
            "settings, median_us, default_us, sweeps, did you mean settings"
        ),
    ),
    (
        "tuned knobs",
        '"median_us": 80.0',
        '"median_us": "80"',
        "{path}:1 must be a line of tuned knobs: median_us ('80') must be of type float",
    ),
    (
        "tuned knobs",
        '"median_us": 80.0',
        '"median_us": -80.0',
        "{path}:1 must be a line of tuned knobs: median_us (-80.0) must be at least 0",
    ),
    (
        "tuned knobs",
        '"median_us": 80.0',
        '"median_us": Infinity',
        (
            "{path}:1 must be a line of tuned knobs: it must be JSON: Infinity is not a "
            "finite number"
        ),
    ),
    (
        "tuned knobs",
        '"default_us": 100.0',
        '"default_us": null',
        ("{path}:1 must be a line of tuned knobs: default_us (None) must be of type float"),
    ),
    (
        "tuned knobs",
        '"sweeps": {',
        '"sweeps": [], "x": {',
        (
            "{path}:1 must be a line of tuned knobs: key (x) must be one of shape, "
            "settings, median_us, default_us, sweeps"
        ),
    ),
    (
        "tuned knobs",
        '{"8": 90.0',
        '{"8": "90"',
        ("{path}:1 must be a line of tuned knobs: sweeps.home_rows.8 ('90') must be of type float"),
    ),
    (
        "tuned knobs",
        '"home_rows": {"8": 90.0, "16": 80.0}',
        '"home_rows": 3',
        ("{path}:1 must be a line of tuned knobs: sweeps.home_rows (3) must be a table"),
    ),
    (
        "tuned knobs",
        '{"version"',
        '[]\n{"version"',
        "{path}:1 must be a line of tuned knobs: value ([]) must be a table",
    ),
    (
        "tuned knobs",
        '{"version"',
        'garbage\n{"version"',
        (
            "{path}:1 must be a line of tuned knobs: it must be JSON: Expecting value: "
            "line 1 column 1 (char 0)"
        ),
    ),
]
