// The programs of a control plane with simulated nodes, for several versions of Kubernetes: as ../controlplane, without the
// programs of a node, whose functions differ between versions.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func run(command *cobra.Command) int { return cli.Run(command) }

var programs = map[string]func() int{
	"etcd":                    func() int { etcdmain.Main(os.Args); return 0 },
	"kube-apiserver":          func() int { return run(apiserver.NewAPIServerCommand()) },
	"kube-controller-manager": func() int { return run(controllermanager.NewControllerManagerCommand()) },
	"kube-scheduler":          func() int { return run(scheduler.NewSchedulerCommand()) },
	"kubectl":                 func() int { return run(kubectl.NewDefaultKubectlCommand()) },
}

func main() {
	name := filepath.Base(os.Args[0])
	if programs[name] == nil && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	program := programs[name]
	if program == nil {
		names := make([]string, 0, len(programs))
		for known := range programs {
			names = append(names, known)
		}
		sort.Strings(names)
		fmt.Fprintf(os.Stderr, "%s: no such program; there are %s\n", name, strings.Join(names, ", "))
		os.Exit(2)
	}
	os.Exit(program())
}
