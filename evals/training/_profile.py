import torch, time
from driftgate.evals.training.model import build_model
from driftgate.evals.training.train_tiny_gdn import training_kernels
from driftgate.evals.training.chunk import chunk_gated_delta_rule, causal_convolve
import torch.nn.functional as F
torch.set_float32_matmul_precision("high")
d="cuda" if torch.cuda.is_available() else "cpu"
m=build_model(seed=0,initializer_range=.06,beta_range=(.02,.5)).to(d)
o=torch.optim.AdamW(m.parameters(),lr=1e-3,fused=True)
B,T=(32,1024) if d=="cuda" else (1,256)
x=torch.randint(0,256,(B,T),device=d)
def step():
    with torch.autocast(d,dtype=torch.bfloat16): l=m(x,use_cache=False).logits
    F.cross_entropy(l.float().flatten(0,1),x.flatten()).backward(); o.step(); o.zero_grad()
with training_kernels():
    for _ in range(3): step()
    if d=="cuda": torch.cuda.synchronize()
    t=time.time()
    for _ in range(5): step()
    if d=="cuda": torch.cuda.synchronize()
    print("ms/step",(time.time()-t)/5*1e3)
    from torch.profiler import profile, ProfilerActivity as A
    with profile(activities=[A.CPU]+([A.CUDA] if d=="cuda" else [])) as p: step(); 
    print(p.key_averages().table(sort_by="self_cuda_time_total" if d=="cuda" else "self_cpu_time_total",row_limit=14,max_name_column_width=60)[:5200] if d!="cuda" else "\n".join(f"{e.key[:90]:90s} {e.self_device_time_total/1e3:8.2f} ms {e.count}" for e in sorted(p.key_averages(),key=lambda e:-e.self_device_time_total)[:24]))
