"""The configs of a repository, checked before a commit and told about on a pull request."""
