"""TOML files and overrides that must be refused, and the message that each must give."""

# Name of the case: content of the file, the whole message. {run keys} are the names of the fields
# of ``RunConfig``, and so on.
WRONG_TOML: dict[str, tuple[bytes, str]] = {
    "empty value": (
        b"train =",
        "config ({folder}/run.toml) must be TOML: Invalid value (at end of document)",
    ),
    "unclosed list": (
        b"train = [",
        "config ({folder}/run.toml) must be TOML: Invalid value (at end of document)",
    ),
    "a key twice": (
        b"ep_size = 1\nep_size = 2",
        ("config ({folder}/run.toml) must be TOML: Cannot overwrite a value (at end of document)"),
    ),
    "a table twice": (
        b"[train]\n[train]\n",
        (
            "config ({folder}/run.toml) must be TOML: Cannot declare ('train',) twice (at "
            "line 2, column 7)"
        ),
    ),
    "a table over a value": (
        b"train = 1\n[train]\nseed = 1",
        ("config ({folder}/run.toml) must be TOML: Cannot overwrite a value (at line 2, column 7)"),
    ),
    "bytes that are not UTF-8": (
        b"output = '\xff'",
        "config ({folder}/run.toml) must be UTF-8 text: the byte at offset 10 is not",
    ),
    "UTF-16": (
        b"\xff\xfee\x00p\x00_\x00s\x00i\x00z\x00e\x00 \x00=\x00 \x001\x00",
        "config ({folder}/run.toml) must be UTF-8 text: the byte at offset 0 is not",
    ),
    "a byte order mark": (
        b"\xef\xbb\xbfep_size = 1",
        ("config ({folder}/run.toml) must be TOML: Invalid statement (at line 1, column 1)"),
    ),
    "a null character": (
        b'output = "a\x00b"',
        (
            "config ({folder}/run.toml) must be TOML: Illegal character '\\x00' (at line 1, "
            "column 12)"
        ),
    ),
    "binary": (
        b"xyz{|}~\x7f\x80\x81\x82\x83\x84\x85\x86\x87",
        "config ({folder}/run.toml) must be UTF-8 text: the byte at offset 8 is not",
    ),
    "a pickle": (
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.",
        "config ({folder}/run.toml) must be UTF-8 text: the byte at offset 0 is not",
    ),
    "lists nested deeply": (
        b"ep_size = " + b"[" * 20000,
        "config ({folder}/run.toml) must be TOML with fewer nested lists",
    ),
    "tables nested deeply": (
        b"ep_size = " + b"{a=" * 10000,
        "config ({folder}/run.toml) must be TOML with fewer nested lists",
    ),
    "a long dotted key": (
        b"a." * 29999 + b"a=1",
        "config ({folder}/run.toml) must have at most 200 dots on a line",
    ),
    "too many bytes": (
        b"#" * 65537,
        "config ({folder}/run.toml) must have at most 65536 bytes and has 65537",
    ),
    "JSON": (
        b'{"ep_size": 1}',
        ("config ({folder}/run.toml) must be TOML: Invalid statement (at line 1, column 1)"),
    ),
    "an integer of 5000 digits": (
        b"ep_size = " + b"9" * 5000,
        (
            "config ({folder}/run.toml) must be TOML: Exceeds the limit (4300 digits) for "
            "integer string conversion: value has 5000 digits; use "
            "sys.set_int_max_str_digits() to increase the limit"
        ),
    ),
    "an integer of 400 digits": (
        b"[optimizer]\nlearning_rate = " + b"9" * 400,
        (
            "optimizer.learning_rate "
            "(99999999999999999999999999999999999999999999999999999999999999999999999999999...) "
            "must be finite"
        ),
    ),
    "a date": (b"ep_size = 2024-01-01", "ep_size (datetime.date(2024, 1, 1)) must be of type int"),
    "infinity": (
        b"[optimizer]\nlearning_rate = inf",
        "optimizer.learning_rate (inf) must be finite",
    ),
    "not a number": (
        b"[model.moe.router]\nz_coefficient = nan",
        "model.moe.router.z_coefficient (nan) must be finite",
    ),
    "a boolean for a number": (b"ep_size = true", "ep_size (True) must be of type int"),
    "a number for a boolean": (
        b"[train]\ntensorboard = 1",
        "train.tensorboard (1) must be of type bool",
    ),
    "a list for a name": (
        b'strategy = ["fused", "fused"]',
        "strategy (['fused', 'fused']) must be of type str",
    ),
    "a list of tables": (b"[[train]]\nseed = 1", "train ([{'seed': 1}]) must be a table"),
    "a table for a number": (b"[ep_size]\na = 1", "ep_size ({'a': 1}) must be of type int"),
    "a value for a table": (b'checkpoint = "often"', "checkpoint ('often') must be a table"),
    "an unknown key": (b"nothere = 1", "key (nothere) must be one of {run keys}"),
    "a misspelt key": (
        b"[train]\nnum_stepz = 1",
        ("key (train.num_stepz) must be one of {train keys}, did you mean train.num_steps"),
    ),
    "an unknown table": (
        b"[training]\nseed = 1",
        "key (training) must be one of {run keys}, did you mean train",
    ),
    "a key of another table": (
        b"[train]\nlearning_rate = 1.0",
        "key (train.learning_rate) must be one of {train keys}",
    ),
    "an empty key": (b'"" = 1', "key () must be one of {run keys}"),
    "a key of several lines": (b'"a\\nb" = 1', "key ('a\\nb') must be one of {run keys}"),
    "a very long key": (
        b"a" * 10000 + b" = 1",
        (
            "key "
            "('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...) "
            "must be one of {run keys}"
        ),
    ),
    "an unknown model": (b'model = "gpt-5"', "model (gpt-5) must be one of {models}"),
    "a misspelt model": (
        b'model = "mixtral-8x7"',
        "model (mixtral-8x7) must be one of {models}, did you mean mixtral-8x7b",
    ),
    "a model that is no name": (b"[model]\nname = 3", "model.name (3) must be of type str"),
    "a model that is a list": (b'model = ["tiny"]', "model (['tiny']) must be a name or a table"),
    "a field of the model unknown": (
        b"[model]\nnum_layer = 2",
        ("key (model.num_layer) must be one of {model keys}, did you mean model.num_layers"),
    ),
    "a router that is a name": (
        b'[model.moe]\nrouter = "softmax"',
        "model.moe.router ('softmax') must be a table",
    ),
    "an unknown activation": (
        b'[model.moe]\nactivation = "relu"',
        "model.moe.activation ('relu') must be one of 'swiglu', 'gelu'",
    ),
    "too many experts": (
        b"[model.moe]\nnum_experts = 100000000",
        (
            "num_experts (100000000) must be at most 32767, the largest expert id that "
            "slots are sorted by"
        ),
    ),
    "a vocabulary too large": (
        b"[model]\nvocab_size = 1_000_000_000_000",
        "vocab_size (1000000000000) must be at most 2147483647",
    ),
}

# Name of the case: overrides, the whole message.
WRONG_OVERRIDES: dict[str, tuple[list[str], str]] = {
    "no value": (["ep_size"], "--set (ep_size) must be KEY=VALUE"),
    "no key": (["=1"], "--set (=1) must be KEY=VALUE"),
    "nothing": ([""], "--set () must be KEY=VALUE"),
    "only a dot": ([".=1"], "key () must be one of {run keys}"),
    "an empty part": (["train..seed=1"], "key (train.) must be one of {train keys}"),
    "unknown": (["nothere=1"], "key (nothere) must be one of {run keys}"),
    "unknown below a table": (
        ["train.nothere=1"],
        "key (train.nothere) must be one of {train keys}",
    ),
    "below a value": (["ep_size.a=1"], "ep_size ({'a': 1}) must be of type int"),
    "below a value that was set": (
        ["output=a", "output.b=1"],
        "--set (output.b=1) must name a key below a table, output is none",
    ),
    "text for a number": (["ep_size=two"], "ep_size ('two') must be of type int"),
    "empty for a number": (["ep_size="], "ep_size ('') must be of type int"),
    "a fraction": (["ep_size=1.5"], "ep_size (1.5) must be of type int"),
    "a list": (["ep_size=[1]"], "ep_size ([1]) must be of type int"),
    "a broken list": (["ep_size=[1"], "ep_size ('[1') must be of type int"),
    "lists nested deeply": (
        ["ep_size=" + "[" * 20000],
        (
            "ep_size "
            "('[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[...) "
            "must be of type int"
        ),
    ),
    "two lines": (["ep_size=1\nnum_chunks=2"], "ep_size ('1\\nnum_chunks=2') must be of type int"),
    "a key of two lines": (
        ["ep\nsize=1"],
        "key ('ep\\nsize') must be one of {run keys}, did you mean ep_size",
    ),
    "a key nested deeply": (["a." * 19999 + "a=1"], "key (a) must be one of {run keys}"),
    "a model field nested deeply": (
        ["model.name." + "a." * 19999 + "a=1"],
        "model.name (a very large dict) must be of type str",
    ),
    "a comment": (["ep_size=#"], "ep_size ('#') must be of type int"),
    "a boolean": (["ep_size=true"], "ep_size (True) must be of type int"),
    "an integer of 5000 digits": (
        ["ep_size=" + "9" * 5000],
        (
            "ep_size "
            "('9999999999999999999999999999999999999999999999999999999999999999999999999999...) "
            "must be of type int"
        ),
    ),
    "a huge float": (["max_load=1e400"], "max_load (inf) must be finite"),
    "a surrogate": (
        ["strategy=\ud800", "model=\ud800"],
        "model ('\\ud800') must be one of {models}",
    ),
    "a long name": (
        ["model=" + "a" * 10000],
        (
            "model "
            "('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...) "
            "must be one of {models}"
        ),
    ),
    "a misspelt model": (
        ["model=tinny"],
        "model (tinny) must be one of {models}, did you mean tiny",
    ),
    "a misspelt key": (
        ["strateg=auto"],
        "key (strateg) must be one of {run keys}, did you mean strategy",
    ),
    "a table replaced": (["train=1"], "train (1) must be a table"),
    "a model replaced by a number": (["model=3"], "model (3) must be a name or a table"),
    "an enumerated field": (
        ["train.dtype=float16"],
        "train.dtype ('float16') must be one of 'float32', 'bfloat16'",
    ),
    "a wrong device": (["device=tpu"], "device ('tpu') must be one of 'auto', 'cpu', 'cuda'"),
}
