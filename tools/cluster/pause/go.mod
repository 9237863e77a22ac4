module rljob.dev/tools/cluster/pause

go 1.26.0
