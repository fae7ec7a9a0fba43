// Command policies enforces NetworkPolicies in the network namespace in which it runs: it is kube-router's controller
// of NetworkPolicies, without the routes and the Services of kube-router.
//
//	policies KUBECONFIG NODE SERVICE-NETWORK
//
// It writes one line once it follows the API server. When its standard input ends it removes its rules and sets, and
// ends. It runs iptables, iptables-save, iptables-restore and ipset.
package main

import (
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: policies KUBECONFIG NODE SERVICE-NETWORK")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintf(os.Stderr, "policies: %s\n", err)
		os.Exit(1)
	}
}

func run(kubeconfig, node, services string) error {
	access, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(access)
	if err != nil {
		return err
	}
	config := options.NewKubeRouterConfig()
	config.EnableIPv4 = true
	config.HostnameOverride = node
	config.ClusterIPCIDRs = []string{services}

	stop := make(chan struct{})
	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	namespaces := factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	factory.Start(stop)
	factory.WaitForCacheSync(stop)

	tables, sets, err := netpol.NewIPTablesHandlers(config)
	if err != nil {
		return err
	}
	var setsInUse sync.Mutex
	controller, err := netpol.NewNetworkPolicyController(
		client, config, pods, policies, namespaces, &setsInUse, tables, sets)
	if err != nil {
		return err
	}
	pods.AddEventHandler(controller.PodEventHandler)
	namespaces.AddEventHandler(controller.NamespaceEventHandler)
	policies.AddEventHandler(controller.NetworkPolicyEventHandler)

	heartbeats := make(chan *healthcheck.ControllerHeartbeat)
	var running sync.WaitGroup
	running.Add(1)
	go controller.Run(heartbeats, stop, &running)
	// The controller waits until each of them is taken, and sends one whenever it begins to write rules.
	<-heartbeats
	go func() {
		for range heartbeats {
		}
	}()
	fmt.Println("following")

	io.Copy(io.Discard, os.Stdin)
	close(stop)
	running.Wait()
	controller.Cleanup()
	return nil
}
