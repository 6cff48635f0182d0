def rows(say):
    return []


def table(rows):
    return ""
