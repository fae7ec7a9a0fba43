// Command controlplane is etcd, kube-apiserver, kube-controller-manager and kube-scheduler in one binary, and so are
// the node's kubelet and kube-proxy, which share most of its packages.
//
// The e2e tests need a real cluster on machines that have no container engine. The components are
// imported as Go packages at one pinned version and chosen by the first argument:
//
//	controlplane kube-apiserver --etcd-servers=...
//
// A component lives no longer than its standard input: whoever starts it holds the other end of a pipe, and when
// that process ends, however it ends, the component does too. No component reads its standard input otherwise.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	kubeproxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "k8s.io/component-base/logs/json/register"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: controlplane COMPONENT [flags]")
		os.Exit(2)
	}
	go exitWithStandardInput()
	component := os.Args[1]
	// Each component parses os.Args itself, as if it were its own binary.
	os.Args = append([]string{component}, os.Args[2:]...)
	switch component {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(controllermanager.NewControllerManagerCommand()))
	case "kube-scheduler":
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	case "kubelet":
		os.Exit(cli.Run(kubelet.NewKubeletCommand(context.Background())))
	case "kube-proxy":
		os.Exit(cli.Run(kubeproxy.NewProxyCommand()))
	default:
		fmt.Fprintf(os.Stderr, "controlplane: no component %q\n", component)
		os.Exit(2)
	}
}

// exitWithStandardInput ends the process when its standard input does.
func exitWithStandardInput() {
	io.Copy(io.Discard, os.Stdin)
	fmt.Fprintln(os.Stderr, "controlplane: standard input ended, so does this process")
	os.Exit(1)
}
