#!/usr/bin/env bash
# A step of action.yml: `mmq "$@"` and behind it what $WORDS says, a line an option with its value.
# While it exits with 5 (incomplete: the same command resumes) it is run again, $ATTEMPTS times in all.
# The step's output `exit-code` is mmq's.
set -euo pipefail

words=()
while IFS= read -r line; do
  case $line in
    '') ;;
    -*' '*) words+=("${line%% *}" "${line#* }") ;;
    *) words+=("$line") ;;
  esac
done <<< "${WORDS:-}"

for ((attempt = 1; ; attempt++)); do
  code=0
  mmq "$@" ${words[@]+"${words[@]}"} || code=$?
  ((code == 5 && attempt < ${ATTEMPTS:-1})) || break
  echo "mmq stopped before the end (exit 5); attempt $((attempt + 1)) of $ATTEMPTS" >&2
  sleep "${PAUSE:-30}"
done
echo "exit-code=$code" >> "$GITHUB_OUTPUT"
exit "$code"
