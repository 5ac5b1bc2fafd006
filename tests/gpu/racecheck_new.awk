# Prints what a report of racecheck (--racecheck-report analysis) has that a file of known findings does not explain, a pair
# of accesses a line; the exit status is 1 if there is such. How often which line of the file explained one goes to stderr.
#
#   awk -v known=tests/gpu/racecheck_known.txt -f tests/gpu/racecheck_new.awk REPORT
BEGIN {
  while ((getline line <known) > 0) {
    if (line ~ /^(#|$)/) continue
    kinds[++lines] = ""
    if (match(line, /^\[[a-z -]+\] /)) {
      kinds[lines] = " " substr(line, 2, RLENGTH - 3) " "
      line = substr(line, RLENGTH + 1)
    }
    part[lines] = line
  }
}

function judge(kind, finding, n) {
  for (n = 1; n <= lines; ++n) {
    if (index(finding, part[n]) == 0) continue
    if (kinds[n] == "" || index(kinds[n], " " kind " ") > 0) {
      ++explained[n, kind]
      return
    }
  }
  print kind ": " finding
  found = 1
}

# A race names its first access, and each of the lines behind it another one.
function finish() {
  if (race != "" && !seconds) judge("alone", race)
  race = ""
}

/^========= +(Error|Warning): / {
  finish()
  if (match($0, /Race reported between (Read|Write) access at /)) {
    race = $0
    first = substr($0, RSTART + 22, RLENGTH - 22) ~ /^Read/ ? "read" : "write"
    seconds = 0
  } else {
    judge("other", $0)
  }
  next
}

race != "" && /^========= +and (Read|Write) access at / {
  ++seconds
  second = $0
  sub(/^========= +/, "", second)
  judge(first "-" (second ~ /^and Read/ ? "read" : "write"), race " " second)
  next
}

{ finish() }

END {
  finish()
  for (key in explained) {
    split(key, of, SUBSEP)
    print "racecheck: " explained[key] " pairs of kind " of[2] " are known: " part[of[1]] >"/dev/stderr"
  }
  exit found
}
