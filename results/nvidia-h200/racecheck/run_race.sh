#!/bin/bash
# Runs each variant of race_ws plain and under racecheck; prints one line a variant. The full logs go to LOG.
# Environment: LOG (default ./race.log), BUDGET_S (default 58: starts no run after that),
# VARIANTS (default all, for example "5 13"), REBUILD (set: builds first), SANITIZER_FLAGS (added, for example --racecheck-detect-level=info).
cd "$(dirname "$0")" || exit 2
log=${LOG:-./race.log}
budget_s=${BUDGET_S:-58}
export PATH=$PATH:/usr/local/cuda/bin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "$REBUILD" ] || ! ./race_ws list >"$work/list" 2>&1; then
  nvcc -gencode arch=compute_90a,code=sm_90a -lineinfo -o race_ws race_ws.cu || exit 2
  ./race_ws list >"$work/list" || exit 2
fi
{ date -u; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; compute-sanitizer --version; } >"$log" 2>&1
grep -hE 'NVIDIA|Version' "$log"

SECONDS=0
timeout -k 5 20 ./race_ws all >"$work/plain" 2>&1
echo "plain: exit status $?, $SECONDS s" | tee -a "$log"
cat "$work/plain" >>"$log"
result() { grep -m1 -E "^RESULT $1 " "$2" | awk '{print $4}'; }

printf '%-32s %-6s %-6s %7s %6s %8s  %-24s %s\n' variant plain check hazards errors warnings kinds 'lines (W write, R read)'
while read -r number name; do
  [ -n "$VARIANTS" ] && [[ " $VARIANTS " != *" $number "* ]] && continue
  if [ "$SECONDS" -ge "$budget_s" ]; then echo "$name not run: $budget_s s are over"; continue; fi
  one=$work/one
  # shellcheck disable=SC2086
  timeout -k 5 20 compute-sanitizer --tool racecheck --racecheck-report all --print-limit 2000 $SANITIZER_FLAGS \
    ./race_ws "$number" >"$one" 2>&1
  status=$?
  { echo; echo "##### $number $name: exit status $status"; cat "$one"; } >>"$log"
  summary=$(grep -m1 'RACECHECK SUMMARY' "$one")
  count() { grep -oE "[0-9]+ $1" <<<"$summary" | head -1 | cut -d' ' -f1; }
  kinds=$(grep -oE 'RAW|WAR|WAW' "$one" | sort | uniq -c | awk '{printf "%s%s:%s", (NR>1?",":""), $2, $1}')
  lines=$(sed -nE 's/.*\b(R|W)(ead|rite) (access|Thread).*race_ws\.cu:([0-9]+).*/\1\4/p' "$one" | sort | uniq -c |
    awk '{printf "%s%s(%s)", (NR>1?" ":""), $2, $1}')
  printf '%-32s %-6s %-6s %7s %6s %8s  %-24s %s\n' "$name" "$(result "$number" "$work/plain" | grep . || echo none)" \
    "$(result "$number" "$one" | grep . || echo "none/$status")" "$(count hazard)" "$(count error)" "$(count warning)" \
    "${kinds:--}" "${lines:--}"
done <"$work/list"
echo "total: $SECONDS s"
echo
# What the named lines are.
sed -nE 's/.*(race_ws\.cu:[0-9]+).*/\1/p' "$log" | cut -d: -f2 | sort -nu | while read -r line; do
  echo "$line: $(sed -n "${line}p" race_ws.cu | sed 's/^ *//')"
done
