"""Changes that make a valid placement or file of counts wrong, and the reader's message.

The valid files are those of ``file_formats``.
"""

# Format, text of the valid file, what stands there instead (once), the whole message.
WRONG_TABLES: list[tuple[str, str, str, str]] = [
    (
        "placement",
        '"version": 1',
        '"version": 2',
        "placement ({path}) must be of version 1 and is of 2",
    ),
    (
        "placement",
        '"version": 1',
        '"version": true',
        "placement ({path}) must be of version 1 and is of True",
    ),
    (
        "placement",
        '"version": 1',
        '"version": 1.0',
        "placement ({path}) must be of version 1 and is of 1.0",
    ),
    ("placement", '"version": 1, ', "", "placement ({path}) must be of version 1 and is of None"),
    (
        "placement",
        '"num_experts": 3',
        '"num_experts": 4',
        "placement ({path}) must be for num_experts 3 and is for 4",
    ),
    (
        "placement",
        '"num_experts": 3',
        '"num_experts": "3"',
        (
            "placement ({path}) must be as halley plan balance writes it: num_experts "
            "('3') must be of type int"
        ),
    ),
    (
        "placement",
        '"num_experts": 3, ',
        "",
        ("placement ({path}) must be as halley plan balance writes it: num_experts is required"),
    ),
    (
        "placement",
        "[0, 1]",
        "[0, true]",
        (
            "placement ({path}) must be as halley plan balance writes it: layers[0][0][1] "
            "(True) must be of type int"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "[0, 1.0]",
        (
            "placement ({path}) must be as halley plan balance writes it: layers[0][0][1] "
            "(1.0) must be of type int"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        '[0, "1"]',
        (
            "placement ({path}) must be as halley plan balance writes it: layers[0][0][1] "
            "('1') must be of type int"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "[0, null]",
        (
            "placement ({path}) must be as halley plan balance writes it: layers[0][0][1] "
            "(None) must be of type int"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "[0, -1]",
        (
            "placement ({path}) must be right in layer 0: placement of rank 0 ([0, -1]) "
            "must be ascending, no expert twice"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "[0, 3]",
        (
            "placement ({path}) must be right in layer 0: placement of rank 0 ([0, 3]) "
            "must have experts below num_experts (3)"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "[1, 0]",
        (
            "placement ({path}) must be right in layer 0: placement of rank 0 ([1, 0]) "
            "must be ascending, no expert twice"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "[0, 0]",
        (
            "placement ({path}) must be right in layer 0: placement of rank 0 ([0, 0]) "
            "must be ascending, no expert twice"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "[0]",
        (
            "placement ({path}) must be right in layer 0: placement of rank 1 ([0, 2]) "
            "must have 1 experts, as that of rank 0"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "[]",
        (
            "placement ({path}) must be right in layer 0: placement (empty) must have at "
            "least one rank and one expert on it"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "{}",
        (
            "placement ({path}) must be as halley plan balance writes it: layers[0][0] "
            "({}) must be a list"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        '"01"',
        (
            "placement ({path}) must be as halley plan balance writes it: layers[0][0] "
            "('01') must be a list"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "[0, 1e400]",
        "placement ({path}) must be JSON: '1e400' is not a finite number",
    ),
    (
        "placement",
        "[0, 1]",
        "[0, NaN]",
        "placement ({path}) must be JSON: NaN is not a finite number",
    ),
    (
        "placement",
        "[0, 1]",
        "[0, 100000000000000000000]",
        (
            "placement ({path}) must be right in layer 0: placement of rank 0 ([0, "
            "100000000000000000000]) must have experts below num_experts (3)"
        ),
    ),
    (
        "placement",
        "[0, 1]",
        "[0, [1]]",
        (
            "placement ({path}) must be as halley plan balance writes it: layers[0][0][1] "
            "([1]) must be of type int"
        ),
    ),
    (
        "placement",
        '"layers": [[[0, 1], [0, 2]], ',
        '"layers": [' + "[[0, 1], [0, 2]], " * 4,
        (
            "placement ({path}) must have 2 layers, the model's MoE layers, or one for all "
            "of them, and has 5"
        ),
    ),
    (
        "placement",
        '"layers"',
        '"layer"',
        (
            "placement ({path}) must be as halley plan balance writes it: key (layer) must "
            "be one of version, num_experts, layers, did you mean layers"
        ),
    ),
    (
        "placement",
        '{"version": 1',
        '{"version": 1, "version": 1',
        "placement ({path}) must be JSON: an object has the key 'version' twice",
    ),
    (
        "placement",
        '{"version": 1',
        '{"version": 1, "path": "/etc/passwd"',
        (
            "placement ({path}) must be as halley plan balance writes it: key (path) must "
            "be one of version, num_experts, layers"
        ),
    ),
    (
        "placement",
        "}",
        "",
        ("placement ({path}) must be JSON: Expecting ',' delimiter: line 2 column 1 (char 80)"),
    ),
    (
        "placement",
        "}",
        "}}",
        "placement ({path}) must be JSON: Extra data: line 1 column 81 (char 80)",
    ),
    (
        "placement",
        "[[0, 1], [0, 2]]",
        "[[0, 1, 2]]",
        "placement ({path}) must be for ep_size 2 and is for 1 ranks",
    ),
    ("counts", '"version": 1', '"version": 0', "counts ({path}) must be of version 1 and is of 0"),
    (
        "counts",
        '"version": 1',
        '"version": "1"',
        "counts ({path}) must be of version 1 and is of '1'",
    ),
    (
        "counts",
        '"first_step": 1',
        '"first_step": 1.5',
        ("counts ({path}) must be as halley train writes it: first_step (1.5) must be of type int"),
    ),
    (
        "counts",
        '"first_step": 1, ',
        "",
        "counts ({path}) must be as halley train writes it: first_step is required",
    ),
    (
        "counts",
        '"last_step": 9',
        '"last_step": null',
        ("counts ({path}) must be as halley train writes it: last_step (None) must be of type int"),
    ),
    (
        "counts",
        '"counts"',
        '"count"',
        (
            "counts ({path}) must be as halley train writes it: key (count) must be one of "
            "version, first_step, last_step, counts, did you mean counts"
        ),
    ),
    (
        "counts",
        "[3, 0, 5]",
        "[3, 0]",
        "counts ({path}) of layer 1 must have 2 experts, as layer 0, and have 3",
    ),
    ("counts", "[3, 0, 5]", "[0, 0, 0]", "counts ({path}) of layer 0 must not all be 0"),
    (
        "counts",
        "[3, 0, 5]",
        "[3, -1, 5]",
        "counts ({path}) must be numbers of at least 0, and -1 is none",
    ),
    (
        "counts",
        "[3, 0, 5]",
        "[3, true, 5]",
        "counts ({path}) must be numbers of at least 0, and True is none",
    ),
    (
        "counts",
        "[3, 0, 5]",
        '[3, "0", 5]',
        "counts ({path}) must be numbers of at least 0, and '0' is none",
    ),
    (
        "counts",
        "[3, 0, 5]",
        "[3, null, 5]",
        "counts ({path}) must be numbers of at least 0, and None is none",
    ),
    (
        "counts",
        "[3, 0, 5]",
        "[3, [0], 5]",
        "counts ({path}) must be numbers of at least 0, and [0] is none",
    ),
    (
        "counts",
        "[3, 0, 5]",
        "[]",
        "counts ({path}) must be numbers of each expert, or lists of them",
    ),
    (
        "counts",
        "[3, 0, 5]",
        "7",
        "counts ({path}) must be numbers of each expert, or lists of them",
    ),
    (
        "counts",
        "[3, 0, 5]",
        "[3, 1e400, 5]",
        "counts ({path}) must be JSON: '1e400' is not a finite number",
    ),
    (
        "counts",
        "[3, 0, 5]",
        "[3, " + "9" * 400 + ", 5]",
        (
            "counts ({path}) must be numbers of at least 0, and "
            "99999999999999999999999999999999999999999999999999999999999999999999999999999... "
            "is none"
        ),
    ),
    (
        "counts",
        "[3, 0, 5]",
        "[3, Infinity, 5]",
        "counts ({path}) must be JSON: Infinity is not a finite number",
    ),
    (
        "counts",
        "[[3, 0, 5], [1, 2, 3]]",
        "{}",
        "counts ({path}) must be numbers of each expert, or lists of them",
    ),
    (
        "counts",
        "[[3, 0, 5], [1, 2, 3]]",
        '"many"',
        "counts ({path}) must be numbers of each expert, or lists of them",
    ),
    (
        "counts",
        '{"version": 1',
        '{"version": 1, "extra": 1',
        (
            "counts ({path}) must be as halley train writes it: key (extra) must be one of "
            "version, first_step, last_step, counts"
        ),
    ),
    (
        "counts",
        '{"version": 1',
        '{"version": 1, "version": 1',
        "counts ({path}) must be JSON: an object has the key 'version' twice",
    ),
]
