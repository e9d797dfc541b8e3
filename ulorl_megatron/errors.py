"""The one error type that is shown to people without a traceback."""


class UserError(Exception):
    """Something the person who started the command can mend.

    The message is one paragraph: what is wrong, where (file, line, key, port), what to do. The command line prints
    it after "error: " and exits with code 2. Programming errors are never wrapped in it: they keep their traceback.
    """
