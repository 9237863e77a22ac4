// The root of the module. The versions are in kubernetes-*.mod, of which `go build -modfile` names one.
module rljob.dev/tools/cluster/versions

go 1.26.0
